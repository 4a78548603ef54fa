"""The prompts of a package, which its system writes, the graph writes, or the user writes."""

from __future__ import annotations

from typing import NamedTuple

from hdexport.package.target import Package, PackageOptions, PackageTarget
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError, Setting
from hdruntime.text.prompts import prompt_name_of, prompts_of

_SERVE = "or serve the bundle: hdexport serve"


class Prompts(NamedTuple):
    """The texts before a query and before a document; empty for none."""

    query: str
    document: str


def prompts_of_package(package: Package) -> Prompts:
    """The prompts that a package gives its system; none where they were left out."""
    return _prompts(package.bundle.manifest) if package.options.prompts else Prompts("", "")


def check_prompts(bundle: Bundle, target: PackageTarget, options: PackageOptions) -> tuple[str, ...]:
    """Notes for the user about a bundle's prompts in a system.

    Raises:
        InputError: the system would run texts without the chat template or the prompt that the bundle gives them.
    """
    manifest = bundle.manifest
    if target.run is None:
        # The bundle's own runtime writes prompts and templates.
        return ()
    if manifest.template is not None:
        raise InputError(
            f"{bundle.path} writes its texts in a chat template, which {target.system} does not know.",
            hint=f"Choose a target that runs the bundle itself, such as mlflow, lancedb or triton, {_SERVE}",
        )
    settings = manifest.sentence
    if not options.prompts or settings is None:
        return ()
    named = {name: prompt for name, prompt in settings.prompts.items() if prompt}
    leave_out = Setting("prompts", False)
    if named and not settings.include_prompt:
        raise InputError(
            f"The model leaves its prompts out of the pooling ({', '.join(named)}); {target.system} pools all tokens.",
            hint=("Package it for texts without prompts (", leave_out, f"), {_SERVE}"),
        )
    if target.prompts or not named:
        return ()
    default = settings.default_prompt_name
    if default in named:
        raise InputError(
            f"Every text has the prompt {named[default]!r:.60} ({default}) by default; {target.system} has no place "
            "for it.",
            hint=(
                "Write the prompt before your texts, and package for that (",
                leave_out,
                f"); or choose a target with a place for prompts, vespa or opensearch; {_SERVE}",
            ),
        )
    shown = "; ".join(f"{name}: {prompt!r:.60}" for name, prompt in named.items())
    return (f"{target.system} adds no prompts. Write the model's prompts before your texts: {shown}",)


def _prompts(manifest: Manifest) -> Prompts:
    prompts, default = prompts_of(manifest)
    of_all = prompts[default] if default is not None else ""

    def prompt(kind: str) -> str:
        name = prompt_name_of(prompts, kind)
        return (prompts[name] if name is not None else "") or of_all

    return Prompts(prompt("query"), prompt("document"))
