"""The identity of a job: a second run of the same one may continue the first, or finds that it is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hdruntime.jobs.input_files import InputFile
from hdruntime.jobs.sources import Version

Identity = Mapping[str, object]
"""Name for messages -> value, as JSON gives it back."""

_OPAQUE = ("bundle", "columns of the output")
"""Messages leave out these values, which tell a person nothing."""


def identity_of_inputs(files: Sequence[InputFile]) -> list[list[object]]:
    """Path or URL, size in bytes and modification time of each file, in order."""
    return [[file.source.identity, file.version.size_bytes, file.version.modified] for file in files]


def difference(old: Identity, new: Identity) -> str | None:
    """The first difference of two identities, in words; None if they are equal."""
    for name in {**new, **old}:
        before, now = old.get(name), new.get(name)
        if before == now:
            continue
        if isinstance(before, list) and isinstance(now, list):
            return _different_inputs(before, now)
        return f"the {name} has changed" if name in _OPAQUE else f"{name} was {before}, and is {now}"
    return None


def _different_inputs(old: list[list[Any]], new: list[list[Any]]) -> str:
    before, now = [file[0] for file in old], [file[0] for file in new]
    for path in now:
        if path not in before:
            return f"{path} was not among its inputs, or had no rows"
    for path in before:
        if path not in now:
            return f"its input {path} is missing, or has no rows any more"
    for (path, *found), (old_path, *was) in zip(new, old, strict=False):
        if path == old_path and found != was:
            before_it, now_it = (Version(size_bytes=size, modified=modified) for size, modified in (was, found))
            return f"its input {path} has changed since: {before_it.change(now_it)}"
    return "its inputs were in another order"
