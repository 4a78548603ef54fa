"""Checkpoints that are converted or arranged: each in a temporary directory that lasts as long as it is used."""

from __future__ import annotations

__all__ = ["Converted", "remove_converted", "temporary_directory"]

import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

_directories: weakref.WeakSet[tempfile.TemporaryDirectory[str]] = weakref.WeakSet()
"""All temporary directories in use."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A converted checkpoint.

    Attributes:
        path: of the Hugging Face directory.
        remarks: choices and omissions, a line each.
        kept: the object that the directory lasts as long as.
        adapter: name of the folder in it that holds an adapter to be merged; None for none.
    """

    path: Path
    remarks: tuple[str, ...]
    kept: object
    adapter: str | None = None


def temporary_directory(original: Path) -> tuple[Path, tempfile.TemporaryDirectory[str]]:
    """An empty directory with the name of a checkpoint's, for messages, and the object that it lasts as long as."""
    # Removed with the last reference to it, or when the process ends.
    kept = tempfile.TemporaryDirectory(prefix="hdexport-")
    _directories.add(kept)
    path = Path(kept.name) / (original.resolve().name or "model")
    path.mkdir()
    return path, kept


def remove_converted() -> None:
    """Remove all converted checkpoints, for a process that ends without Python's own clean-up."""
    for kept in list(_directories):
        kept.cleanup()
