"""Checkpoints that are converted or arranged: each in a temporary directory that lasts as long as it is used."""

from __future__ import annotations

import json
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_directories: weakref.WeakSet[tempfile.TemporaryDirectory[str]] = weakref.WeakSet()
"""All temporary directories in use."""


class Converted(NamedTuple):
    """A converted checkpoint.

    Attributes:
        path: path of the Hugging Face directory.
        remarks: choices and omissions, a line each.
        kept: the directory lasts as long as this object.
        adapter: name of the folder in it that holds an adapter to be merged; None for none.
    """

    path: Path
    remarks: tuple[str, ...]
    kept: object
    adapter: str | None = None


def written(
    original: Path,
    links: Mapping[str, Path],
    files: Mapping[str, Any],
    *,
    remarks: tuple[str, ...] = (),
    adapter: str | None = None,
) -> Converted:
    """A directory with the name of the original's, for messages, into which nothing is copied: `links` are name -> file
    or folder, and `files`, which take precedence, name -> text or JSON value."""
    # Removed with the last reference to it, or when the process ends.
    kept = tempfile.TemporaryDirectory(prefix="hdexport-")
    _directories.add(kept)
    path = Path(kept.name) / (original.resolve().name or "model")
    path.mkdir()
    for name, entry in links.items():
        if name not in files:
            (path / name).symlink_to(entry.resolve())
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (path / name).write_text(text, encoding="utf-8")
    return Converted(path=path, remarks=remarks, kept=kept, adapter=adapter)


def remove_converted() -> None:
    """Removes all converted checkpoints, for a process that ends without Python's own clean-up."""
    for kept in list(_directories):
        kept.cleanup()
