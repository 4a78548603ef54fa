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
    """A file to write in a folder that is there; it replaces the one at `path` when the block ends, and is removed if
    the block raises. An OSError says that it cannot be written; the file of before stays."""
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
    """Write a file, text as UTF-8, that is the old one or the new one whenever the process stops; as `whole_file`."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def is_partial(path: Path) -> bool:
    """Whether this is the leftover of a file that a killed process was writing."""
    return path.name.startswith(".") and _PARTIAL in path.name
