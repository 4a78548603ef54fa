"""The systems that `hdexport package` writes for: a `PackageTarget` in each file of ``targets/``."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hdexport.package.graph import Dtype, GraphOptions
from hdexport.package.targets import names
from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError, Setting

EMBEDDERS = frozenset({Task.SENTENCE_SIMILARITY})
"""Tasks whose bundles have a pooled embedding."""


@dataclass(frozen=True, kw_only=True)
class PackageOptions:
    """Options of `hdexport package`.

    Attributes:
        target: name of the system, of `targets()`.
        output: directory to write; for Triton, the model repository.
        force: replace a package at the output.
        check: run the package as its system would, and compare it with the bundle.
        opset, ir_version, dtype, token_type_ids, single_file: see `GraphOptions`; None for the
            target's own.
        pooled: give every token's state the pooled embedding, so that any pooling of the reader is right.
        max_seq_length: tokens to which the package's tokenizer truncates; None for the bundle's number.
        name: name of the model in the system; None for the bundle's.
        backend: backend that runs the bundle, for targets that run hdexport's runtime.
        prompts: give the system the model's prompts, and reject one that has no place for the default prompt. False:
            texts have no prompts, or have them already.
        prompt_name: name of the prompt that a graph puts before every text; None for the model's default.
        accept_differences: kinds of texts, of `hdexport.package.tokenizer.check.KINDS`, whose token ids may differ.
    """

    target: str
    output: Path
    force: bool = False
    check: bool = True
    opset: int | None = None
    ir_version: int | None = None
    dtype: Dtype | None = None
    token_type_ids: bool | None = None
    single_file: bool | None = None
    pooled: bool | None = None
    max_seq_length: int | None = None
    name: str | None = None
    backend: str = "auto"
    prompts: bool = True
    prompt_name: str | None = None
    accept_differences: tuple[str, ...] = ()


GRAPH = frozenset({"opset", "ir_version", "dtype", "token_type_ids", "single_file", "pooled"})
"""Options of targets whose graph may have several forms."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that is being written.

    Attributes:
        bundle: the bundle that it is made of.
        directory: directory of its files.
        options: options of the call.
        graph: options of its graph.
        dtypes: data types of its graphs, one for each; see `of`.
        max_seq_length: tokens to which its tokenizer truncates.
        name: name of the model.
        prompt: prompt that the package puts before every text; empty where users write prompts.
    """

    bundle: Bundle
    directory: Path
    options: PackageOptions
    graph: GraphOptions
    dtypes: tuple[Dtype, ...]
    max_seq_length: int
    name: str
    prompt: str = ""

    def of(self, dtype: Dtype) -> Package:
        return dataclasses.replace(self, graph=dataclasses.replace(self.graph, dtype=dtype))

    @property
    def hidden_size(self) -> int:
        settings = self.bundle.manifest.sentence
        size = next(spec.shape[-1] for spec in self.bundle.manifest.outputs if spec.name == "sentence_embedding")
        assert isinstance(size, int)
        return (settings and settings.truncate_dim) or size


@dataclass(frozen=True, kw_only=True)
class PackageTarget:
    """A system that loads packages.

    Attributes:
        name: value of ``--for``.
        system: the system, as its users call it, with the version whose rules are followed.
        source: file or page, with its version, that states these rules.
        tried: libraries that ran the package, as ``name version``; empty where only `source` was read.
        write: writes the files of a package, and returns notes for its users.
        run: what the system computes of a package and a text, or a query and a document: output name -> array. None
            where hdexport's runtime runs the bundle, which is what a package is compared with.
        next_step: the command or the place in the system that takes the package.
        tasks: tasks whose bundles the system runs.
        graph: options of the graph.
        dtypes: data types of a bundle's graphs, for systems that choose one when they load a package.
        takes: names of the further options that the target takes.
        names: pattern of the names that the system takes; None for names of plain files.
        prompts: whether the system writes prompts before queries and documents, which the package names.
        longest: tokens to which the system truncates, whatever the tokenizer says; None if it does not.
        check: rejects a bundle that the system cannot run, before anything is written.
    """

    name: str
    system: str
    source: str
    write: Callable[[Package], tuple[str, ...] | None]
    next_step: str
    run: Callable[..., Mapping[str, FloatArray]] | None = None
    tried: tuple[str, ...] = ()
    tasks: frozenset[Task] = EMBEDDERS
    graph: GraphOptions = field(default_factory=GraphOptions)
    dtypes: Callable[[Manifest], tuple[Dtype, ...]] = lambda manifest: ("float32",)
    takes: frozenset[str] = frozenset()
    names: str | None = None
    prompts: bool = False
    longest: int | None = None
    check: Callable[[Bundle], None] = lambda bundle: None


def is_reranker(manifest: Manifest) -> bool:
    """Whether a classifier scores a query and a document."""
    return manifest.task is Task.TEXT_CLASSIFICATION and len(manifest.labels) == 1


def targets() -> dict[str, PackageTarget]:
    return {name: target_named(name) for name in names()}


def target_named(name: str) -> PackageTarget:
    """The target with a name.

    Raises:
        InputError: no target has the name.
    """
    modules = names()
    if name not in modules:
        raise InputError(parameter="target", value=name, accepted=f"one of {', '.join(modules)}")
    return importlib.import_module(f"hdexport.package.targets.{modules[name]}").TARGET


def check_options(target: PackageTarget, options: PackageOptions) -> None:
    """Reject options that the target does not take.

    Raises:
        InputError: an option has no effect on the target.
    """
    defaults = PackageOptions(target=options.target, output=options.output)
    for option in (*sorted(GRAPH), "name", "backend", "prompt_name", "accept_differences"):
        if option not in target.takes and getattr(options, option) != getattr(defaults, option):
            raise InputError(
                Setting(option),
                f" does not change what is written for {target.name}.",
                hint=("Leave out ", Setting(option), "."),
            )
    if target.run is None and not options.prompts:
        raise InputError(
            Setting("prompts", False),
            f" does not change what is written for {target.name}, where the bundle itself writes prompts.",
            hint="Leave it out.",
        )
