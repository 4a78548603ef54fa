"""Files appear whole or not at all: a temporary sibling, brought to the disk and renamed into place."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_PARTIAL = ".partial-"
_PART_OF_NAME = 50


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write in a folder that is there; it replaces the one at `path` when the block ends, and is removed if
    the block raises. An OSError says that it cannot be written; the file of before stays."""
    # A unique name: two processes may write at the same time.
    # A part of the name: a name may have 255 bytes, and a character has up to four.
    partial = path.with_name(f".{path.name[:_PART_OF_NAME]}{_PARTIAL}{secrets.token_hex(4)}")
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


def read_bounded(path: Path, *, most_bytes: int) -> bytes:
    """The content of a file, or of a pipe that a program writes to, such as the shell's ``<(command)``.

    An OSError says that it cannot be read, that it is a device, or that it has more bytes. A named pipe that no program
    has open is empty.
    """
    # Without O_NONBLOCK, opening a pipe waits for its writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, "It is no file", str(path))
        os.set_blocking(file.fileno(), True)
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"It has more than {most_bytes} bytes", str(path))
    return content


def is_partial(path: Path) -> bool:
    """Whether this is the leftover of a file that a killed process was writing."""
    return path.name.startswith(".") and _PARTIAL in path.name
