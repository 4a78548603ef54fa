"""Outputs of PyTorch and of parts of graphs that wait on the disk for their comparison."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hdruntime.errors import HdexportError, Setting
from hdruntime.os_errors import is_full_disk


@contextlib.contextmanager
def temporary_outputs(prefix: str) -> Iterator[Path]:
    """Make a temporary directory, which is removed with what is in it.

    Raises:
        HdexportError: in the block, a file could not be written because the disk is full.
    """
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        directory = Path(name)
        try:
            yield directory
        except OSError as error:
            if not is_full_disk(error, directory):
                raise
            written = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
            raise HdexportError(
                f"The disk of {directory.parent} is full: the comparison with PyTorch needs more than "
                f"{written / 1e6:.1f} MB there.",
                hint=(
                    "Set TMPDIR to a directory on a larger disk, or build without the comparison: ",
                    Setting("verify", None, command="build"),
                ),
            ) from error
