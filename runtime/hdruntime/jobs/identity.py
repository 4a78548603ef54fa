"""The identity of a job: a second run of the same one may continue the first, or finds that it is done."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hdruntime.bundle.checked_json import json_from_dataclass
from hdruntime.bundle.manifest import Manifest
from hdruntime.constants import KERNELS_FOLDER
from hdruntime.jobs.input_files import InputFile
from hdruntime.jobs.places import Version
from hdruntime.jobs.progress import Saved, json_from_saved, saved_from_json

Identity = Mapping[str, object]
"""Name for messages -> value, as JSON gives it back."""

_OPAQUE = ("bundle", "columns of the output")
"""Messages leave out these values, which tell a person nothing."""

_RECEIPT = "user.hdexport.job"
"""Extended attribute of an output that identifies its job, so that the same job, run again, finds that it is done.

A job may be killed when its output is in place and nothing else is left of it, but before its caller sees that it
succeeded. The attribute needs no second file and moves with the output. On systems without extended attributes, such a
job is refused because its output exists.
"""

_MOST_CHARACTERS = 500
"""Most characters of the first error: a file system may limit attributes to 4 kB."""


def identity_of_bundle(manifest: Manifest) -> str:
    """A checksum of the bundle's computation: its graphs, weights and tokenizer.

    Engines, their kernels and the record of who built them are left out: they compute the same, and are rebuilt for
    another machine, which may continue the job.
    """
    engine_files = {name for engine in manifest.engines for name in (engine.file, engine.passport)}
    files = {
        name: record
        for name, record in manifest.files.items()
        if name not in engine_files and not name.startswith(f"{KERNELS_FOLDER}/")
    }
    rest = dataclasses.replace(manifest, files=files, engines=(), verification=None, made_by={})
    return hashlib.sha256(json_from_dataclass(rest).encode()).hexdigest()


def identity_of_inputs(files: Sequence[InputFile]) -> list[list[object]]:
    """Path or URL, size in bytes and modification time of each file, in order."""
    return [[file.place.identity, file.version.size_bytes, file.version.modified] for file in files]


def difference(old: Identity, new: Identity) -> str | None:
    """The first difference of two identities, in words; None if they are equal."""
    for name in new:
        before, now = old.get(name), new[name]
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


def leave_receipt(output: int, identity: Identity, saved: Saved) -> None:
    """Mark a complete output, an open file, with its job and the job's outcome, if the file system can."""
    first_error = saved.counts.first_error and saved.counts.first_error[:_MOST_CHARACTERS]
    counts = dataclasses.replace(saved.counts, first_error=first_error, dropped_columns=())
    note = json.dumps([*_file_and_job(output, identity), json_from_saved(dataclasses.replace(saved, counts=counts))])
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: not on Linux
        os.setxattr(output, _RECEIPT, note.encode())


def has_receipt(output: Path) -> bool:
    """Whether the output of a job is there."""
    return _receipt(output) is not None


def receipt_of(output: Path, identity: Identity) -> Saved | None:
    """A job's outcome, if the file is its output and has not changed since; else None."""
    note = _receipt(output)
    if note is None or note[:-1] != _file_and_job(output, identity):
        return None
    with contextlib.suppress(ValueError):
        return saved_from_json(note[-1])
    return None


def _receipt(output: Path) -> list[str] | None:
    try:
        note = json.loads(os.getxattr(output, _RECEIPT))
    except (OSError, ValueError, AttributeError):
        return None
    return note if isinstance(note, list) and note else None


def _file_and_job(output: Path | int, identity: Identity) -> list[str]:
    status = os.stat(output)
    job = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return [str(status.st_size), str(status.st_mtime_ns), job]
