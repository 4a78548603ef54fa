"""Writes docs/sentence_transformers_names.md: python docs/generate_sentence_transformers.py"""

from __future__ import annotations

__all__ = ["page"]

import inspect
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import hdruntime
from hdruntime.replacements import REPLACEMENTS

_CLASSES = {
    "SentenceTransformer": hdruntime.SentenceEncoder,
    "CrossEncoder": hdruntime.CrossEncoder,
    "SparseEncoder": hdruntime.SparseEncoder,
    "MultiVectorEncoder": hdruntime.MultiVectorEncoder,
}

_ARGUMENTS = {
    "cache_folder": "`HF_HOME` is where the cache is",
    "config_kwargs": "`hdexport build` reads the checkpoint's own",
    "default_prompt_name": "the attribute of that name",
    "keep_in_fp32_modules": "`hdexport build` chooses them",
    "kwargs": "refused by name",
    "local_files_only": "`HF_HUB_OFFLINE=1`",
    "model_card_data": "`hdexport push` writes the card",
    "model_kwargs": "options of `hdexport build`, such as `--fp16`",
    "model_name_or_path": "`bundle`: a directory, or a name on the hub",
    "modules": "`hdexport build` of a checkpoint with them",
    "num_labels": "`hdexport build` reads the checkpoint's own",
    "processor_kwargs": "`hdexport build` reads the checkpoint's own",
    "prompts": "the attribute of that name",
    "revision": "`NAME@REVISION`",
    "similarity_fn_name": "the attribute of that name",
    "token": "`HF_TOKEN`",
    "trust_remote_code": "`hdexport build --trust-remote-code`",
    "use_auth_token": "`HF_TOKEN`",
}
"""Argument that methods here lack -> what takes its place."""

_LEFT_OUT = {"smart_apply"}
"""Names that transformers gives PyTorch's modules while it loads a model, and that are there from then on."""

_HEAD = """\
# sentence-transformers, name by name

Written by `python docs/generate_sentence_transformers.py` from sentence-transformers {version},
`hdruntime/replacements.py` and docstrings; change these instead.

Every public name of the library's classes, those of PyTorch's modules among them. [Coming from
sentence-transformers](sentence_transformers.md) says how numbers and defaults are kept. `SentenceEncoder` stands for
`SentenceTransformer`; the other classes have the library's names.
"""

_WORKS = """\
## What works

| name | of the library's | here |
|---|---|---|
"""

_LACKS = """\

## What something else replaces

`hasattr` is False for these names. Using one raises `MissingAttributeError`, an `AttributeError` with the sentence in
the last column.

| name | of the library's | here |
|---|---|---|
"""

_DIFFERS = """\

## Arguments

All other arguments of the methods above have the library's names, places and defaults.

| of | argument | here, or the default here |
|---|---|---|
"""


def page() -> str:
    """The page, Markdown.

    Raises:
        KeyError: the library has a name or an argument that is neither here nor replaced.
    """
    works: dict[tuple[str, str], list[str]] = {}
    lacks: dict[tuple[str, str], list[str]] = {}
    owners: dict[str, list[str]] = {}
    for library in _CLASSES:
        for name in _names(library):
            owners.setdefault(name, []).append(library)
    for name, libraries in sorted(owners.items()):
        having = [library for library in libraries if _has(_CLASSES[library], name)]
        if having:
            works.setdefault((_listed(having), _summary(_CLASSES[having[0]], name)), []).append(name)
        if len(having) < len(libraries):
            of = _listed([library for library in libraries if library not in having])
            lacks.setdefault((of, REPLACEMENTS[name]), []).append(name)
    differences: dict[tuple[str, str], list[str]] = {}
    for method, argument, here in sorted(row for library in _CLASSES for row in _differences(library)):
        differences.setdefault((argument, here), []).append(method)
    head = _HEAD.format(version=version("sentence-transformers"))
    return "".join([head, "\n", _WORKS, *_rows(works), _LACKS, *_rows(lacks), _DIFFERS, *_rows(differences)])


def _names(library: str) -> set[str]:
    """Public names of an object of the class; its attributes too, so one is made, without a model."""
    import sentence_transformers
    import torch

    names = dir(getattr(sentence_transformers, library)(modules=[torch.nn.Identity()]))
    return {name for name in names if name[0] != "_"} - _LEFT_OUT


def _has(ours: type, name: str) -> bool:
    return hasattr(ours, name) or f"\n    {name}: " in _attributes(ours) or f", {name}: " in _attributes(ours)


def _attributes(ours: type) -> str:
    return (inspect.getdoc(ours) or "").partition("Attributes:")[2]


def _summary(ours: type, name: str) -> str:
    found = getattr(ours, name, None)
    if isinstance(found, property) or callable(found):
        sentence = (inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " ").strip()
        return _markdown(sentence)
    return "an attribute"


def _markdown(docstring: str) -> str:
    for role in (":meth:", ":func:", ":class:"):
        docstring = docstring.replace(role, "")
    return docstring.replace("``", "`").replace("|", "\\|").replace("~", "")


def _rows(groups: dict[tuple[str, str], list[str]]) -> Iterator[str]:
    for (of, here), names in groups.items():
        yield f"| {', '.join(f'`{name}`' for name in names)} | {of} | {here} |\n"


def _listed(libraries: list[str]) -> str:
    return "all" if len(libraries) == len(_CLASSES) else ", ".join(libraries)


def _differences(library: str) -> Iterator[tuple[str, str, str]]:
    """Arguments that methods here lack, or that have another default: of the class, method, argument, difference."""
    import sentence_transformers

    theirs, ours = getattr(sentence_transformers, library), _CLASSES[library]
    for method in ("__init__", *sorted(_names(library))):
        one, other = getattr(theirs, method, None), getattr(ours, method, None)
        if not (inspect.isroutine(one) and inspect.isroutine(other)):
            continue
        there, here = (dict(inspect.signature(each).parameters) for each in (one, other))
        # What the first two pass on to `encode` is listed there; PyTorch's own `to` names no arguments.
        if method in ("encode_query", "encode_document") or "args" in there:
            continue
        label = ours.__name__ if method == "__init__" else f"{ours.__name__}.{method}"
        for name, parameter in list(there.items())[1:]:
            # `encode` of a SentenceEncoder takes both names.
            found = here.get(name) or here.get({"inputs": "sentences"}.get(name, ""))
            if found is None:
                yield label, f"`{name}`", _ARGUMENTS[name]
            elif parameter.default != found.default:
                yield label, f"`{name}`", f"`{found.default!r}`; in the library `{parameter.default!r}`"


if __name__ == "__main__":
    Path(__file__).with_name("sentence_transformers_names.md").write_text(page(), encoding="utf-8")
