"""Write a bundle as the files that another system loads."""

from __future__ import annotations

__all__ = ["PackageOptions", "Packaged", "package_bundle"]

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path

from hdexport.package.check import Compared, compare
from hdexport.package.files import write_json
from hdexport.package.graph import GraphOptions, Outputs, check_inputs
from hdexport.package.prompts import check_prompts
from hdexport.package.target import Package, PackageOptions, PackageTarget, check_options, target_named
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.staging import DirectoryKind, staged_directory
from hdruntime.errors import InputError, MissingDependencyError, Setting, write
from hdruntime.text.lengths import checked_length
from hdruntime.text.prompts import chosen_prompt, prompts_of

_MARKER = "hdexport_package.json"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names that are a plain file and need no escapes in a URL."""


@dataclass(frozen=True, kw_only=True)
class Packaged:
    """A package that was written.

    Attributes:
        path: its directory.
        target: the system that loads it.
        compared: each sample text, compared with the bundle; empty where nothing was run.
        not_compared: why nothing was run; empty where it was.
        notes: notes for users of the package.
    """

    path: Path
    target: PackageTarget
    compared: tuple[Compared, ...] = ()
    not_compared: str = ""
    notes: tuple[str, ...] = ()


def package_bundle(bundle: Bundle, options: PackageOptions) -> Packaged:
    """Write a package, whole or not at all, and compare it with the bundle.

    Raises:
        InputError: the system cannot run the bundle, or an option does not fit.
        OutputExistsError: the output exists and may not be replaced.
        VerificationError: the system would compute other outputs.
    """
    target = target_named(options.target)
    check_options(target, options)
    length, name = _checked(bundle, target, options), _checked_name(bundle, target, options)
    notes = check_prompts(bundle, target, options)
    with staged_directory(options.output, _KIND, force=options.force) as directory:
        package = Package(
            bundle=bundle,
            directory=directory,
            options=options,
            graph=_graph_options(target.graph, options),
            dtypes=(options.dtype,) if options.dtype else target.dtypes(bundle.manifest),
            max_seq_length=length,
            name=name,
            prompt=_prompt(bundle, options) if "prompt_name" in target.takes else "",
        )
        notes += target.write(package) or ()
        compared, not_compared = _compare(target, package)
        files = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
        write_json(
            directory / _MARKER,
            {
                "target": target.name,
                "bundle": bundle.manifest.name,
                "max_seq_length": length,
                "min_cosine": min((each.cosine for each in compared), default=None),
                "notes": notes,
                "files": files,
            },
        )
    return Packaged(
        path=Path(options.output),
        target=target,
        compared=tuple(compared),
        not_compared=not_compared,
        notes=notes,
    )


def _compare(target: PackageTarget, package: Package) -> tuple[list[Compared], str]:
    if not package.options.check:
        return [], "the check was left out"
    if target.run is None:
        return [], "the package runs the bundle itself, in hdexport's runtime"
    try:
        return compare(target, package), ""
    except MissingDependencyError as error:
        return [], write(error.problem)


def _checked(bundle: Bundle, target: PackageTarget, options: PackageOptions) -> int:
    """The tokens to which the package truncates; a bundle that the system cannot run is rejected."""
    manifest = bundle.manifest
    if manifest.task not in target.tasks:
        raise InputError(
            f"{target.system} runs bundles for {', '.join(sorted(task.value for task in target.tasks))}; this "
            f"bundle's task is {manifest.task.value}.",
            hint="Choose another target, or serve the bundle: hdexport serve",
        )
    if manifest.tokenizer is None:
        raise InputError(
            f"{bundle.path} has no tokenizer, and {target.system} reads texts.",
            hint="Build the bundle from a checkpoint with a tokenizer.",
        )
    target.check(bundle)
    if target.run is not None:
        check_inputs(bundle)
    length = checked_length(options.max_seq_length, manifest, max_tokens=manifest.max_len)
    if target.longest is not None and length > target.longest:
        raise InputError(
            f"{target.system} truncates every text to {target.longest} tokens; this bundle's texts have up to "
            f"{length}.",
            hint=(
                "Package it for shorter texts (",
                Setting("max_seq_length", target.longest),
                "), or serve the bundle: hdexport serve",
            ),
        )
    return length


def _prompt(bundle: Bundle, options: PackageOptions) -> str:
    """The prompt before every text."""
    if options.prompts:
        return chosen_prompt(*prompts_of(bundle.manifest), name=options.prompt_name, prompt=None)
    if options.prompt_name is not None:
        raise InputError(
            "A graph has the prompt ",
            Setting("prompt_name", options.prompt_name),
            ", or none.",
            hint=("Leave out ", Setting("prompts", False), "."),
        )
    return ""


def _checked_name(bundle: Bundle, target: PackageTarget, options: PackageOptions) -> str:
    name = options.name or bundle.manifest.name
    if target.names is not None and not re.fullmatch(target.names, name):
        raise InputError(
            f"The name {name!r} is not valid for a model of {target.system}, where names are {target.names}.",
            hint=("Give one: ", Setting("name", "encoder")),
        )
    if not _NAME.fullmatch(name):
        raise InputError(
            f"The name {name!r} is not valid for a model: use letters, digits, '.', '_' and '-', beginning with a "
            "letter or digit.",
            hint=("Give one: ", Setting("name", "encoder")),
        )
    return name


def _graph_options(graph: GraphOptions, options: PackageOptions) -> GraphOptions:
    values = {
        name: value
        for name in ("opset", "ir_version", "dtype", "token_type_ids", "single_file")
        if (value := getattr(options, name)) is not None
    }
    if options.pooled is not None:
        values["outputs"] = Outputs.POOLED_TOKENS if options.pooled else Outputs.BUNDLE
    replaced = dataclasses.replace(graph, **values)
    replaced.check()
    return replaced


def _is_package(directory: Path) -> bool:
    try:
        return "target" in json.loads((directory / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _other_files(directory: Path) -> list[str]:
    ours = {_MARKER, *json.loads((directory / _MARKER).read_text(encoding="utf-8")).get("files", [])}
    paths = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())
    # Python compiles scripts beside them, as Triton does its model.
    return sorted(path for path in paths if path not in ours and "__pycache__" not in path.split("/"))


_KIND = DirectoryKind(name="package of hdexport", marker=_MARKER, is_one=_is_package, other_files=_other_files)
