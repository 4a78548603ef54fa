"""Lines of large files one by one, with where each ends, in bounded memory."""

from __future__ import annotations

__all__ = ["MAX_LINE_BYTES", "Line", "read_lines"]

import codecs
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hdruntime.errors import InputError
from hdruntime.jobs.regular_files import opened_input

MAX_LINE_BYTES = 16 * 2**20
"""A longer line is not read: a file without line ends would fill the memory. To tokenise so much takes 3 GB already."""

_SKIPPED_BYTES = 2**20
"""Read at a time of a line that is too long."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a file.

    Attributes:
        number: counted from 1.
        end: bytes of the file up to the line's end, the line end included.
        checksum: CRC-32 of those bytes.
        text: without its end; None where it cannot be read.
        error: why not, else None.
    """

    number: int
    end: int
    checksum: int
    text: str | None = None
    error: str | None = None


def read_lines(file: Path, *, offset: int = 0, number: int = 0, checksum: int = 0) -> Iterator[Line]:
    """The lines of a file that come after a line.

    Args:
        file: UTF-8, with or without a byte order mark; lines end with a line feed, or with that and a carriage return.
        offset: ``end`` of the line before; 0 for the whole file.
        number: ``number`` of the line before.
        checksum: ``checksum`` of the line before.

    Raises:
        InputError: the file cannot be read on, or is a pipe or a device.
    """
    try:
        with opened_input(file) as stream:
            stream.seek(offset)
            while content := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                offset += len(content)
                checksum = zlib.crc32(content, checksum)
                if len(content) > MAX_LINE_BYTES and not content.endswith(b"\n"):
                    skipped, checksum = _skip_line(stream, checksum)
                    offset += skipped
                    yield Line(number=number, end=offset, checksum=checksum, error=_too_long(number))
                    continue
                yield _decoded(content, number=number, end=offset, checksum=checksum)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from error


def _decoded(content: bytes, *, number: int, end: int, checksum: int) -> Line:
    if number == 1:
        content = content.removeprefix(codecs.BOM_UTF8)
    try:
        text = content.removesuffix(b"\n").removesuffix(b"\r").decode()
    except UnicodeDecodeError as error:
        reason = f"Line {number} is not valid UTF-8: byte {error.start + 1} of it, {error.reason}."
        return Line(number=number, end=end, checksum=checksum, error=reason)
    return Line(number=number, end=end, checksum=checksum, text=text)


def _skip_line(stream: BinaryIO, checksum: int) -> tuple[int, int]:
    """Read to the end of the line; the bytes that were read, and the checksum that they go on."""
    skipped = 0
    while content := stream.readline(_SKIPPED_BYTES):
        skipped += len(content)
        checksum = zlib.crc32(content, checksum)
        if content.endswith(b"\n"):
            break
    return skipped, checksum


def _too_long(number: int) -> str:
    return (
        f"Line {number} has more than {MAX_LINE_BYTES} bytes, the most that is read of a line.\n"
        "Cut its text into several rows."
    )
