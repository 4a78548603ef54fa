"""SHA-256 of files, several at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

_READ_BYTES = 1 << 20
"""Size of the buffer that files are hashed through; larger ones were not faster."""

Result = TypeVar("Result")


def for_each_file(function: Callable[[str], Result], sizes: Mapping[str, int]) -> dict[str, Result]:
    """The results of a function that hashes a file, for several files at a time: hashing holds no lock of Python's.

    Args:
        function: called with the file's name.
        sizes: name -> bytes. The largest comes first, since it takes longest.
    """
    names = sorted(sizes, key=lambda name: -sizes[name])
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(function, names), strict=True))


def sha256_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(view[:size])
    return digest.hexdigest()
