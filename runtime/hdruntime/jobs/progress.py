"""Progress of a batch job and its counts so far, as they are reported, saved and read back."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hdruntime.bundle.checked_json import LargeCount, from_values
from hdruntime.jobs.checksums import Checksum, json_with_checksum, values_with_checksum
from hdruntime.jobs.input_files import InputFile
from hdruntime.jobs.rows import Position

_MAX_NAMES = 20
"""Names of dropped columns that are kept: every row may have others."""


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """The counts of some rows.

    Attributes:
        rows: how many, failed ones included.
        tokens: number of tokens of the rows that did not fail.
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
            dropped_columns=[*dict.fromkeys([*self.dropped_columns, *later.dropped_columns])][:_MAX_NAMES],
        )


class JobState(StrEnum):
    """The state of a job."""

    RUNNING = "running"
    """Rows are read and run."""
    FINISHING = "finishing"
    """All rows are done; the output is made from them."""


@dataclass(frozen=True, kw_only=True)
class JobProgress(RowCounts):
    """Progress of a job; at its end, its outcome. Rows of earlier runs of the job count, too.

    Attributes:
        state: state of the job.
        resumed_rows: rows that were done before this process began.
        seconds: time that the job took, in this process and earlier ones.
        tokens_per_second: tokens per second of this process.
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
class PartialEntry:
    """The entry of a manifest for the finished rows of the shard that runs.

    Attributes:
        counts: counts of these rows.
        end: position at which the shard ends.
        share: share of the shard's tokens, 0 to 1.
        file: checksum of the file of these rows.
    """

    counts: RowCounts
    end: Position
    share: float
    file: Checksum = field(default_factory=Checksum)


@dataclass(frozen=True, kw_only=True)
class JobManifest:
    """What a job has finished, and the checksums of the files that hold it. A commit replaces the manifest on the disk.

    Attributes:
        position: position in the inputs at which reading continues.
        counts: counts of the rows before the position.
        seconds: time that these rows took.
        results: checksum of their results; the file may hold more bytes, which do not count.
        ranges: checksum of the calibration ranges of quantized vectors; None without ranges.
        partial: finished rows after the position; None if there are none.
        output: checksum of the output when it is made of the results.
        uploaded: files of the output that are at its URL.
        is_done: whether the output is in place.
    """

    position: Position = field(default_factory=Position)
    counts: RowCounts = field(default_factory=RowCounts)
    seconds: float = 0.0
    results: Checksum = field(default_factory=Checksum)
    ranges: Checksum | None = None
    partial: PartialEntry | None = None
    output: Checksum | None = None
    uploaded: Sequence[str] = ()
    is_done: bool = False

    @property
    def all_counts(self) -> RowCounts:
        return self.counts if self.partial is None else self.counts + self.partial.counts


def json_from_manifest(manifest: JobManifest) -> str:
    """A JSON object, with its checksum."""
    return json_with_checksum(dataclasses.asdict(manifest))


def manifest_from_json(text: str | bytes) -> JobManifest:
    """Read the text of `json_from_manifest`; ValueError for any other text."""
    values = values_with_checksum(text)
    manifest = from_values(values, JobManifest, name="manifest")
    if json.loads(json.dumps(dataclasses.asdict(manifest))) != values:
        raise ValueError("it lacks keys of a manifest, or has others")
    return manifest


class ProgressMeter:
    """Computes progress from the rows that are done, those when this process began, and the time that passes."""

    def __init__(self, files: Sequence[InputFile], manifest: JobManifest) -> None:
        self._files = files
        self._resumed = manifest
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time that the job took so far, in this process and earlier ones."""
        return self._resumed.seconds + time.monotonic() - self._began

    def progress(self, state: JobState, manifest: JobManifest) -> JobProgress:
        """How far the job is with this much done."""
        seconds = time.monotonic() - self._began
        tokens = manifest.all_counts.tokens - self._resumed.all_counts.tokens
        bytes_read, bytes_total = self._bytes_done(manifest), sum(f.version.size_bytes for f in self._files)
        rows = [file.rows for file in self._files]
        is_arriving = any(file.source.is_arriving for file in self._files)
        read_here = bytes_read - self._bytes_done(self._resumed)
        return JobProgress(
            **vars(manifest.all_counts),
            state=state,
            resumed_rows=self._resumed.all_counts.rows,
            seconds=self._resumed.seconds + seconds,
            tokens_per_second=tokens / seconds if seconds else 0.0,
            rows_total=None if None in rows else sum(filter(None, rows)),
            bytes_read=bytes_read,
            bytes_total=bytes_read if is_arriving else bytes_total,
            eta_seconds=seconds * (bytes_total - bytes_read) / read_here if read_here and not is_arriving else None,
        )

    def _bytes_done(self, manifest: JobManifest) -> int:
        before = self._bytes_before(manifest.position)
        if manifest.partial is None:
            return before
        return before + round(manifest.partial.share * (self._bytes_before(manifest.partial.end) - before))

    def _bytes_before(self, position: Position) -> int:
        whole = sum(file.version.size_bytes for file in self._files[: position.file])
        return whole + self._files[position.file].bytes_before(position.offset)
