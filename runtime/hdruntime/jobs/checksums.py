"""Checksums of the files of a job."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hdruntime.bundle.checked_json import LargeCount

_BLOCK_BYTES = 2**20
"""Bytes of a file that are read at a time."""

_KEY = "crc32"
"""Key of a JSON object that holds the checksum of the object's other keys."""


@dataclass(frozen=True, kw_only=True)
class Checksum:
    """The size in bytes and the CRC-32 of the content of a file."""

    size_bytes: LargeCount = 0
    crc32: LargeCount = 0

    def after(self, data: bytes | memoryview) -> Checksum:
        """The checksum after more data was appended."""
        return Checksum(size_bytes=self.size_bytes + len(data), crc32=zlib.crc32(data, self.crc32))


def checksum_at(path: Path, *, size_bytes: int | None = None) -> Checksum:
    """The checksum of a file or of its first bytes; for a directory, the checksum of its files' names and contents."""
    checksum = Checksum()
    if path.is_dir():
        for file in sorted(path.iterdir()):
            checksum = checksum.after(f"{file.name} {checksum_at(file)}\n".encode())
        return checksum
    with path.open("rb", buffering=0) as stream:
        while size_bytes is None or checksum.size_bytes < size_bytes:
            wanted = _BLOCK_BYTES if size_bytes is None else min(_BLOCK_BYTES, size_bytes - checksum.size_bytes)
            block = stream.read(wanted)
            if not block:
                break
            checksum = checksum.after(block)
    return checksum


def json_with_checksum(values: Mapping[str, object]) -> str:
    """A JSON object with its checksum."""
    return json.dumps({**values, _KEY: _crc32_of(values)})


def values_with_checksum(text: str | bytes) -> dict[str, object]:
    """The object that `json_with_checksum` wrote, without its checksum; ValueError for any other text."""
    try:
        # Paths may have lone surrogates, which `hdruntime.bundle.checked_json` rejects.
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
