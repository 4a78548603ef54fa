"""The standard output as the place of a job's results: nothing is kept, so a job that is stopped starts over."""

from __future__ import annotations

__all__ = ["StandardOutput"]

import sys
from collections.abc import Mapping

from hdruntime.jobs.input_watch import Stamp
from hdruntime.jobs.progress import RowCounts
from hdruntime.jobs.rows import Position
from hdruntime.jobs.saved import Saved
from hdruntime.jobs.vectors import Ranges
from hdruntime.jobs.writers import STDOUT, ResultEncoding


class StandardOutput:
    """Has the methods of a `JobFolder`; results are out when they are appended.

    Attributes:
        path: for messages.
        saved: what is done.
        ranges: that vectors are quantised with.
    """

    def __init__(self) -> None:
        self.path = STDOUT
        self.saved = Saved()
        self.ranges: Ranges | None = None

    def append(self, data: bytes, *, position: Position, stamp: Stamp, counts: RowCounts, seconds: float) -> None:
        """Write the results of rows.

        Raises:
            BrokenPipeError: the reader is gone.
        """
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        length = self.saved.result_bytes + len(data)
        self.saved = Saved(position=position, stamp=stamp, counts=counts, seconds=seconds, result_bytes=length)

    def keep_ranges(self, ranges: Ranges) -> None:
        """Remember them."""
        self.ranges = ranges

    def commit_if_due(self) -> None:
        """Nothing is kept."""

    def complete(self) -> None:
        """Nothing is kept."""

    def publish(self, encoding: ResultEncoding, *, force: bool, metadata: Mapping[str, str]) -> None:
        """Nothing is left to do."""
