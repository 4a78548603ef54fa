"""How far a batch job is, and what happened so far."""

from __future__ import annotations

__all__ = ["JobProgress", "JobState", "ProgressMeter", "RowCounts"]

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hdruntime.bundle.manifest import LargeCount
from hdruntime.jobs.input_files import InputFile
from hdruntime.jobs.rows import Position


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """What happened to some rows.

    Attributes:
        rows: how many, failed ones included.
        tokens: of the rows that did not fail.
        computed_tokens: tokens that were run; more than `tokens` where a batch was repeated or a row failed.
        padded_tokens: padding that was run beside them.
        errors: how many rows failed, by kind; see `hdruntime.jobs.rows.ErrorKind`.
        first_error: id and error of the first row that failed.
    """

    rows: LargeCount = 0
    tokens: LargeCount = 0
    computed_tokens: LargeCount = 0
    padded_tokens: LargeCount = 0
    errors: Mapping[str, LargeCount] = field(default_factory=dict)
    first_error: str | None = None

    @property
    def failed_rows(self) -> int:
        """How many rows failed."""
        return sum(self.errors.values())

    @property
    def padding_waste(self) -> float:
        """Share of what was computed that was padding, 0 to 1."""
        return self.padded_tokens / max(1, self.computed_tokens + self.padded_tokens)

    def __add__(self, later: RowCounts) -> RowCounts:
        """The counts of these rows and of ones that come after them."""
        kinds = [*self.errors, *(kind for kind in later.errors if kind not in self.errors)]
        return RowCounts(
            rows=self.rows + later.rows,
            tokens=self.tokens + later.tokens,
            computed_tokens=self.computed_tokens + later.computed_tokens,
            padded_tokens=self.padded_tokens + later.padded_tokens,
            errors={kind: self.errors.get(kind, 0) + later.errors.get(kind, 0) for kind in kinds},
            first_error=self.first_error or later.first_error,
        )


class JobState(str, Enum):
    """What a job is doing."""

    RUNNING = "running"
    """Rows are read and run."""
    FINISHING = "finishing"
    """All rows are done; the output is made of them."""


@dataclass(frozen=True, kw_only=True)
class JobProgress(RowCounts):
    """How far a job is; at its end, what it did. Rows that were done before it was stopped count, too.

    Attributes:
        state: what it is doing.
        resumed_rows: of all rows, those that were done before this process began.
        seconds: time that the job took, in this process and those before.
        tokens_per_second: in this process.
        rows_total: rows of all inputs; None where only reading them would tell.
        bytes_read, bytes_total: of the inputs; of Parquet files, in proportion to their rows; of a compressed one, when
            it is read to its end.
        eta_seconds: time to go, judged by bytes; None before any are read.
    """

    state: JobState
    resumed_rows: int
    seconds: float
    tokens_per_second: float
    rows_total: int | None
    bytes_read: int
    bytes_total: int
    eta_seconds: float | None


class ProgressMeter:
    """Computes progress from counts and the time that passes.

    Args:
        files: the job's inputs.
        counts, position, seconds: where it began, when this process began.
    """

    def __init__(self, files: Sequence[InputFile], *, counts: RowCounts, position: Position, seconds: float) -> None:
        self._files = files
        self._resumed = counts
        self._resumed_bytes = self._bytes_before(position)
        self._resumed_seconds = seconds
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time that the job took so far, in this process and those before."""
        return self._resumed_seconds + time.monotonic() - self._began

    def progress(self, state: JobState, counts: RowCounts, position: Position) -> JobProgress:
        """How far the job is when it has counted so much up to a position."""
        seconds = time.monotonic() - self._began
        bytes_read, bytes_total = self._bytes_before(position), sum(file.version.size_bytes for file in self._files)
        rows = [file.rows for file in self._files]
        read_here = bytes_read - self._resumed_bytes
        return JobProgress(
            **vars(counts),
            state=state,
            resumed_rows=self._resumed.rows,
            seconds=self._resumed_seconds + seconds,
            tokens_per_second=(counts.tokens - self._resumed.tokens) / seconds if seconds else 0.0,
            rows_total=None if None in rows else sum(filter(None, rows)),
            bytes_read=bytes_read,
            bytes_total=bytes_total,
            eta_seconds=seconds * (bytes_total - bytes_read) / read_here if read_here else None,
        )

    def _bytes_before(self, position: Position) -> int:
        whole = sum(file.version.size_bytes for file in self._files[: position.file])
        return whole + self._files[position.file].bytes_before(position.offset)
