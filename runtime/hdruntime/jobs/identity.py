"""The identity of a job: a second run of one job continues the first run, or finds that the job is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hdruntime.errors import Setting
from hdruntime.jobs.input_files import InputFile
from hdruntime.jobs.sources import Version

Identity = Mapping[str, Any]
"""What a run must share with an earlier run to continue it, in JSON. ``settings`` are values by their names, ``inputs``
as `identity_of_inputs` gives them; other keys are in `_NOUNS`."""

_NOUNS = {
    "version": "the version of hdexport",
    "bundle": "the bundle",
    "columns": "the columns of the output",
    "model": "the model",
    "weights_bytes": "the size of the model's weights",
    "texts": "the digest of the texts",
}

_OPAQUE = ("bundle", "columns")
"""Keys whose values tell a person nothing."""

Difference = tuple[str | Setting, ...]


def identity_of_inputs(files: Sequence[InputFile]) -> list[list[object]]:
    """Path or URL, size in bytes and modification time of each file, in order."""
    return [[file.source.identity, file.version.size_bytes, file.version.modified] for file in files]


def difference(old: Identity, new: Identity) -> Difference | None:
    """The first difference of two identities, as a message; None if they are equal."""
    for key, now in new.items():
        before = old.get(key)
        if before == now:
            continue
        if key == "settings" and before is not None:
            name = next(name for name in {**now, **before} if before.get(name) != now.get(name))
            return (Setting(name), f" was {before.get(name)}, and is {now.get(name)}")
        if key == "inputs" and before is not None:
            return (_different_inputs(before, now),)
        noun = _NOUNS.get(key, key)
        return (f"{noun} has changed" if key in _OPAQUE else f"{noun} was {before}, and is {now}",)
    return None


def _different_inputs(old: list[list[Any]], new: list[list[Any]]) -> str:
    before, now = [path for path, *_ in old], [path for path, *_ in new]
    for path in now:
        if path not in before:
            return f"{path} was not among its inputs, or had no rows"
    for path in before:
        if path not in now:
            return f"its input {path} is missing, or has no rows any more"
    for (path, *stat), (old_path, *old_stat) in zip(new, old, strict=False):
        if path == old_path and stat != old_stat:
            version, old_version = (Version(size_bytes=size, modified=modified) for size, modified in (stat, old_stat))
            return f"its input {path} has changed since: {old_version.change(version)}"
    return "its inputs were in another order"
