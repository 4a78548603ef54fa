"""Checksums of the files that a job keeps, by which it knows them again."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hdruntime.bundle.checked_json import LargeCount

_READ_BYTES = 2**20
"""Bytes of a file that are read at a time."""

_KEY = "crc32"
"""Key of a JSON object with the checksum of its other keys."""


@dataclass(frozen=True, kw_only=True)
class Checksum:
    """The size in bytes and the CRC-32 of what a job has written to a file."""

    size_bytes: LargeCount = 0
    crc32: LargeCount = 0

    def after(self, data: bytes | memoryview) -> Checksum:
        """The checksum when more data was written."""
        return Checksum(size_bytes=self.size_bytes + len(data), crc32=zlib.crc32(data, self.crc32))


def checksum_of(descriptor: int, *, size_bytes: int | None = None) -> Checksum:
    """The checksum of an open file, or of its first bytes; of a directory, that of its files' names and content.

    The position of the descriptor stays where it is.
    """
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        return _checksum_of_directory(descriptor)
    checksum = Checksum()
    while size_bytes is None or checksum.size_bytes < size_bytes:
        most = _READ_BYTES if size_bytes is None else min(_READ_BYTES, size_bytes - checksum.size_bytes)
        block = os.pread(descriptor, most, checksum.size_bytes)
        if not block:
            break
        checksum = checksum.after(block)
    return checksum


def _checksum_of_directory(directory: int) -> Checksum:
    checksum = Checksum()
    for name in sorted(os.listdir(directory)):
        # O_NONBLOCK: do not wait for the other end of a pipe.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        try:
            content = checksum_of(file)
        finally:
            os.close(file)
        checksum = checksum.after(f"{name} {content}\n".encode())
    return checksum


def checksum_at(path: Path) -> Checksum:
    """The checksum of a file or a directory of files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return checksum_of(descriptor)
    finally:
        os.close(descriptor)


def json_with_checksum(values: Mapping[str, object]) -> str:
    """A JSON object with its checksum."""
    return json.dumps({**values, _KEY: _crc32_of(values)})


def values_with_checksum(text: str | bytes) -> dict[str, object]:
    """The object of `json_with_checksum`, without its checksum; ValueError for any other text."""
    try:
        # Paths may have lone surrogates, which `hdruntime.bundle.checked_json` refuses.
        values = json.loads(text)
    except RecursionError:
        raise ValueError("too many lists and objects are inside each other") from None
    if not isinstance(values, dict):
        raise ValueError("not an object")
    written = values.pop(_KEY, None)
    if written != _crc32_of(values):
        raise ValueError("its content has changed since it was written")
    return values


def _crc32_of(values: Mapping[str, object]) -> str:
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"
