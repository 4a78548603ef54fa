"""Errors of the disk that an output is on, told to who reads them."""

from __future__ import annotations

__all__ = ["disk_errors_explained"]

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from hdruntime.errors import HdexportError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def disk_errors_explained(output: Path) -> Iterator[None]:
    """Say of an error of the disk what it means for the output and what to do.

    Raises:
        HdexportError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        advice = (
            "Free some space there; then the same command continues."
            if error.errno in _NO_SPACE
            else "Check who may write there, or choose another place with -o."
        )
        raise HdexportError(f"{output} could not be written: {error.strerror or error}.\n{advice}") from error
