"""Files appear whole or not at all: a temporary sibling, brought to the disk and renamed into place."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_PARTIAL = ".partial-"


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write; it replaces the one at `path` when the block ends, and is removed if the block raises.

    Args:
        path: its folder has to be there.

    Raises:
        OSError: the file cannot be written; the file of before stays.
    """
    # A unique name: two processes may write at the same time.
    partial = path.with_name(f".{path.name}{_PARTIAL}{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that is the old one or the new one, whenever the process stops.

    Args:
        path: the file; its folder has to be there.
        content: bytes, or text, which is written as UTF-8.

    Raises:
        OSError: the file cannot be written; the file of before stays.
    """
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def is_partial(path: Path) -> bool:
    """Whether this is the leftover of a file that a killed process was writing."""
    return path.name.startswith(".") and _PARTIAL in path.name
