"""The files of a job's folder: where they are, what they say, and how they are replaced and removed."""

from __future__ import annotations

__all__ = [
    "FINISHED_FILE",
    "JOB_FILE",
    "RESULTS_FILE",
    "SAVED_FILE",
    "damaged",
    "identity_in",
    "is_published",
    "job_folder_path",
    "remove_files",
    "replace_file",
    "saved_in",
    "sync_directory",
]

import contextlib
import json
import os
from pathlib import Path

from hdruntime.errors import HdexportError
from hdruntime.jobs.identity import Identity
from hdruntime.jobs.lock import LOCK_FILE
from hdruntime.jobs.saved import Saved, saved_from_json

JOB_FILE = "job.json"
SAVED_FILE = "progress.json"
RESULTS_FILE = "results"
FINISHED_FILE = "finished"
_FILES = (
    JOB_FILE,
    SAVED_FILE,
    f"{JOB_FILE}.partial",
    f"{SAVED_FILE}.partial",
    RESULTS_FILE,
    f"{FINISHED_FILE}.partial",
    FINISHED_FILE,
    LOCK_FILE,
)
"""All that may be in the folder, in the order of its removal. Without the first the others mean nothing; as long as the
last is there, nobody else begins."""


def job_folder_path(output: Path) -> Path:
    """Where the folder of an output is; a link is followed."""
    target = output.resolve()
    return target.with_name(f".{target.name}.job")


def is_published(folder: Path) -> bool:
    """Whether the output of a complete job was moved into place."""
    left = (folder / RESULTS_FILE).exists() or (folder / FINISHED_FILE).exists()
    return saved_in(folder).complete and not left


def identity_in(folder: Path) -> Identity:
    """Which job the folder is of; an empty one where it is of none.

    Raises:
        HdexportError: the file is damaged.
    """
    content = _content(folder / JOB_FILE)
    try:
        identity: Identity = json.loads(content or "{}")
    except ValueError as error:
        raise damaged(folder, f"{JOB_FILE}: {error}") from error
    return identity


def saved_in(folder: Path) -> Saved:
    """What is done; nothing where no row is kept.

    Raises:
        HdexportError: the file is damaged.
    """
    content = _content(folder / SAVED_FILE)
    try:
        return Saved() if content is None else saved_from_json(content)
    except ValueError as error:
        raise damaged(folder, f"{SAVED_FILE}: {error}") from error


def damaged(folder: Path, reason: str) -> HdexportError:
    """What to raise where the folder does not hold what a job leaves."""
    return HdexportError(f"The unfinished job in {folder} is damaged: {reason}.\nStart over with --restart.")


def replace_file(path: Path, text: str) -> None:
    """Write a file that is the old one or the new one, whenever the machine stops."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def remove_files(folder: Path, *, keep: tuple[str, ...] = ()) -> None:
    """Remove our files, and the folder unless something is kept or somebody put something there."""
    for name in _FILES:
        if name not in keep:
            (folder / name).unlink(missing_ok=True)
    if not keep:
        with contextlib.suppress(OSError):
            folder.rmdir()


def sync_directory(directory: Path) -> None:
    """Bring what was renamed or removed in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None  # what is in the folder's place is said when that is made
