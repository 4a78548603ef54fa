"""Progress of a batch job and its counts so far, as they are reported, saved and read back."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hdruntime.bundle.checked_json import LargeCount, from_values
from hdruntime.jobs.checksums import Checksum, json_with_checksum, values_with_checksum
from hdruntime.jobs.input_files import InputFile
from hdruntime.jobs.rows import Position

_MOST_NAMES = 20
"""Names of dropped columns that are kept: every row may have others."""


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """The counts of some rows.

    Attributes:
        rows: how many, failed ones included.
        tokens: of the rows that did not fail.
        computed_tokens: tokens that were run; more than `tokens` if a batch was repeated or a row failed.
        padded_tokens: padding that was run with them.
        truncated_rows: rows whose text was truncated to the length of texts.
        errors: number of failed rows, by kind; see `hdruntime.jobs.rows.ErrorKind`.
        first_error: id and error of the first row that failed.
        dropped_columns: the first names of columns that the output lacks although all were to be kept; see `Row`.
    """

    rows: LargeCount = 0
    tokens: LargeCount = 0
    computed_tokens: LargeCount = 0
    padded_tokens: LargeCount = 0
    truncated_rows: LargeCount = 0
    errors: Mapping[str, LargeCount] = field(default_factory=dict)
    first_error: str | None = None
    dropped_columns: Sequence[str] = ()

    @property
    def failed_rows(self) -> int:
        """Number of failed rows."""
        return sum(self.errors.values())

    @property
    def padding_waste(self) -> float:
        """Padding as a share of all computed tokens, 0 to 1."""
        return self.padded_tokens / max(1, self.computed_tokens + self.padded_tokens)

    def __add__(self, later: RowCounts) -> RowCounts:
        """The counts of these rows and later ones."""
        return RowCounts(
            rows=self.rows + later.rows,
            tokens=self.tokens + later.tokens,
            computed_tokens=self.computed_tokens + later.computed_tokens,
            padded_tokens=self.padded_tokens + later.padded_tokens,
            truncated_rows=self.truncated_rows + later.truncated_rows,
            errors=dict(Counter(self.errors) + Counter(later.errors)),
            first_error=self.first_error or later.first_error,
            dropped_columns=[*dict.fromkeys([*self.dropped_columns, *later.dropped_columns])][:_MOST_NAMES],
        )


class JobState(str, Enum):
    """The state of a job."""

    RUNNING = "running"
    """Rows are read and run."""
    FINISHING = "finishing"
    """All rows are done; the output is made from them."""


@dataclass(frozen=True, kw_only=True)
class JobProgress(RowCounts):
    """Progress of a job; at its end, its outcome. Rows of earlier runs of the job count, too.

    Attributes:
        state: of the job.
        resumed_rows: rows that were done before this process began.
        seconds: time that the job took, in this process and earlier ones.
        tokens_per_second: in this process.
        rows_total: rows of all inputs; None if this is unknown before they are read.
        bytes_read, bytes_total: of the inputs; of Parquet files, in proportion to their rows; of a compressed file,
            when its end is reached; of a standard input that stays open, both are the bytes that were read.
        eta_seconds: time to go, estimated from bytes; None before any are read, and while the standard input is open.
    """

    state: JobState
    resumed_rows: int
    seconds: float
    tokens_per_second: float
    rows_total: int | None
    bytes_read: int
    bytes_total: int
    eta_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class SavedPart:
    """Rows after the position of `Saved` that are done before the shard that begins there is.

    Attributes:
        counts: of these rows.
        end: where the shard ends.
        share: of the shard's tokens, 0 to 1.
        file: what the file that keeps the rows holds.
    """

    counts: RowCounts
    end: Position
    share: float
    file: Checksum = field(default_factory=Checksum)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The outcome of a job, so far.

    Attributes:
        position: where reading continues.
        stamp: of the file at the position; see `hdruntime.jobs.input_watch`.
        seconds: time that the rows before the position took.
        results: what the file of their results holds; bytes after that do not count.
        ranges: what the file of the calibration ranges of quantised vectors holds; None without ranges.
        part: rows after the position that are done; None for none.
        output: the output of all rows, when it is made.
    """

    position: Position = field(default_factory=Position)
    stamp: tuple[int, int] | None = None
    counts: RowCounts = field(default_factory=RowCounts)
    seconds: float = 0.0
    results: Checksum = field(default_factory=Checksum)
    ranges: Checksum | None = None
    part: SavedPart | None = None
    output: Checksum | None = None

    @property
    def all_counts(self) -> RowCounts:
        """The counts of all rows that are done."""
        return self.counts if self.part is None else self.counts + self.part.counts


def json_from_saved(saved: Saved) -> str:
    """A JSON object, with its checksum."""
    return json_with_checksum(dataclasses.asdict(saved))


def saved_from_json(text: str | bytes) -> Saved:
    """Read the text of `json_from_saved`; ValueError for any other."""
    values = values_with_checksum(text)
    saved = from_values(values, Saved, name="progress")
    if json.loads(json.dumps(dataclasses.asdict(saved))) != values:
        raise ValueError("not what a job saves: something is missing, or there is more")
    return saved


class ProgressMeter:
    """Computes progress from the rows that are done, those when this process began, and the time that passes."""

    def __init__(self, files: Sequence[InputFile], saved: Saved) -> None:
        self._files = files
        self._resumed = saved
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time that the job took so far, in this process and earlier ones."""
        return self._resumed.seconds + time.monotonic() - self._began

    def progress(self, state: JobState, saved: Saved) -> JobProgress:
        """How far the job is with this much done."""
        seconds = time.monotonic() - self._began
        bytes_read, bytes_total = self._bytes_done(saved), sum(f.version.size_bytes for f in self._files)
        rows = [file.rows for file in self._files]
        is_arriving = any(file.source.is_arriving for file in self._files)
        read_here = bytes_read - self._bytes_done(self._resumed)
        return JobProgress(
            **vars(saved.all_counts),
            state=state,
            resumed_rows=self._resumed.all_counts.rows,
            seconds=self._resumed.seconds + seconds,
            tokens_per_second=(saved.all_counts.tokens - self._resumed.all_counts.tokens) / seconds if seconds else 0.0,
            rows_total=None if None in rows else sum(filter(None, rows)),
            bytes_read=bytes_read,
            bytes_total=bytes_read if is_arriving else bytes_total,
            eta_seconds=seconds * (bytes_total - bytes_read) / read_here if read_here and not is_arriving else None,
        )

    def _bytes_done(self, saved: Saved) -> int:
        before = self._bytes_before(saved.position)
        if saved.part is None:
            return before
        return before + round(saved.part.share * (self._bytes_before(saved.part.end) - before))

    def _bytes_before(self, position: Position) -> int:
        whole = sum(file.version.size_bytes for file in self._files[: position.file])
        return whole + self._files[position.file].bytes_before(position.offset)
