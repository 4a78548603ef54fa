"""A note on an output that tells its job, so that the same job, run again, finds that it is done.

A job may be killed when its output is in place and nothing else is left of it, but before whoever runs it could see
that it ended well. The note is an extended attribute of the file: it takes no second file, and goes where the output
goes. Where a system or file system has none, such a job is refused, because its output exists.
"""

from __future__ import annotations

__all__ = ["has_receipt", "leave_receipt", "receipt_of"]

import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path

from hdruntime.jobs.identity import Identity
from hdruntime.jobs.saved import Saved, json_from_saved, saved_from_json

_NAME = "user.hdexport.job"

_MOST_CHARACTERS = 500
"""Of the first error: a file system may have room for 4 kB of attributes."""


def leave_receipt(output: int, identity: Identity, saved: Saved) -> None:
    """Note on a complete output, an open file, which job it is and what that did, where the file system can."""
    first_error = saved.counts.first_error and saved.counts.first_error[:_MOST_CHARACTERS]
    shortened = dataclasses.replace(saved, counts=dataclasses.replace(saved.counts, first_error=first_error))
    note = json.dumps([*_file_and_job(output, identity), json_from_saved(shortened)])
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: only Linux has it
        os.setxattr(output, _NAME, note.encode())


def has_receipt(output: Path) -> bool:
    """Whether a job has left a note."""
    return _note(output) is not None


def receipt_of(output: Path, identity: Identity) -> Saved | None:
    """What a job did, if the file is its output and has not been changed since; else None."""
    note = _note(output)
    if note is None or note[:-1] != _file_and_job(output, identity):
        return None
    with contextlib.suppress(ValueError):
        return saved_from_json(note[-1])
    return None


def _note(output: Path) -> list[str] | None:
    try:
        note = json.loads(os.getxattr(output, _NAME))
    except (OSError, ValueError, AttributeError):
        return None
    return note if isinstance(note, list) and note else None


def _file_and_job(output: Path | int, identity: Identity) -> list[str]:
    status = os.stat(output)
    job = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return [str(status.st_size), str(status.st_mtime_ns), job]
