"""The pages of weights that OpenVINO has mapped from a bundle and no longer needs."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_SHARED_AND_NEVER_WRITTEN = "r--s"
"""Permissions of a mapping whose pages hold the file's content, so that none of them can be lost."""


def release_mapped_files(paths: Iterable[Path]) -> int:
    """Let the system take back the pages of files that this process has mapped to read; returns the bytes of the
    mappings.

    OpenVINO maps a bundle's weights, and goes on with copies in a layout of its own: 96 MB that stay resident for the
    sample model, of which only the rows of embeddings are read again. Pages that are read again come back from the
    system's cache of the file. Nothing happens on systems other than Linux, which do not list a process's mappings.
    """
    if sys.platform != "linux":
        return 0
    released = 0
    for start, size in _mappings({os.path.realpath(path) for path in paths}):
        failed = ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
        released += 0 if failed else size
    return released


def _mappings(files: set[str]) -> Iterator[tuple[int, int]]:
    """Address and bytes of the mappings of these files."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:  # a system that hides /proc
        return
    for line in lines:
        # address, permissions, offset, device, inode, path
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1] == _SHARED_AND_NEVER_WRITTEN and fields[5] in files:
            start, _, end = fields[0].partition("-")
            yield int(start, 16), int(end, 16) - int(start, 16)
