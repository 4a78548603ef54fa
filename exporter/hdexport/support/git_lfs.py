"""Files of Git LFS that were not fetched: a clone without it has a pointer of three lines in place of each."""

from __future__ import annotations

import shlex
from pathlib import Path

from hdruntime.errors import ModelError

_BEGIN = b"version https://git-lfs.github.com/spec/"
_MOST_BYTES = 1024
"""Most bytes of a pointer, by the specification of Git LFS."""


def refuse_pointer(file: Path) -> None:
    """Refuses a pointer of Git LFS in place of a file; missing or unreadable files are left to others."""
    try:
        with file.open("rb") as opened:
            begin = opened.read(_MOST_BYTES)
    except OSError:
        return
    if begin.startswith(_BEGIN):
        # In an arranged checkpoint the file is a link.
        file = file.resolve()
        raise ModelError(
            f"{file} is a pointer of Git LFS, and the file that it stands for was not fetched.\n"
            f"Fetch it: cd {shlex.quote(str(file.parent))} && git lfs install && git lfs pull"
        )
