"""Lines of large files one by one, with where each ends, in bounded memory."""

from __future__ import annotations

__all__ = ["MAX_LINE_BYTES", "Line", "read_lines"]

import codecs
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from hdruntime.jobs.input_files import InputFile
from hdruntime.jobs.places import read_errors_explained

MAX_LINE_BYTES = 16 * 2**20
"""A longer line is not read: a file without line ends would fill the memory. To tokenise so much takes 3 GB already."""

_SKIPPED_BYTES = 2**20
"""Read at a time of a line that is too long."""


class Line(NamedTuple):
    """A line of a file. A tuple, because these are made the fastest.

    Attributes:
        number: counted from 1.
        end: bytes of the file, decompressed, up to the line's end, the line end included.
        checksum: CRC-32 of those bytes.
        text: without its line feed; what can be told of it where there is an error.
        error: why it cannot be read, else None.
    """

    number: int
    end: int
    checksum: int
    text: str
    error: str | None = None


def read_lines(file: InputFile, *, offset: int = 0, number: int = 0, checksum: int = 0) -> Iterator[Line]:
    """The lines of a file that come after a line.

    Args:
        file: UTF-8, with or without a byte order mark; lines end with a line feed.
        offset: ``end`` of the line before; 0 for the whole file.
        number: ``number`` of the line before.
        checksum: ``checksum`` of the line before.

    Raises:
        InputError: the file cannot be read on, or is a pipe or a device.
    """
    with read_errors_explained(file.name), file.opened(offset) as stream:
        while content := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            offset += len(content)
            checksum = zlib.crc32(content, checksum)
            if len(content) > MAX_LINE_BYTES and not content.endswith(b"\n"):
                skipped, checksum = _skip_line(stream, checksum)
                offset += skipped
                yield Line(number, offset, checksum, "", _too_long(number))
                continue
            if number == 1:
                content = content.removeprefix(codecs.BOM_UTF8)
            content = content.removesuffix(b"\n")
            try:
                yield Line(number, offset, checksum, content.decode())
            except UnicodeDecodeError as error:
                reason = f"Line {number} is not valid UTF-8: byte {error.start + 1} of it, {error.reason}."
                yield Line(number, offset, checksum, content.decode(errors="replace"), reason)


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
