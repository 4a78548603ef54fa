"""Shards: groups of consecutive rows of a job, which any process with a session can run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import pyarrow as pa

from hdruntime.errors import Message, Writer, write
from hdruntime.jobs.input_files import Cell
from hdruntime.jobs.kept_columns import AS_COLUMNS
from hdruntime.jobs.progress import RowCounts
from hdruntime.jobs.rows import Position, Row
from hdruntime.tasks.text_inference import texts_of_window

_MAX_BYTES = 2**26
"""Kept columns of about this size end a shard."""

Values = TypeVar("Values", bound=Mapping[str, object])


class PartialShard(NamedTuple):
    """Finished rows of a shard that still runs.

    Attributes:
        values: end of a row -> the task's values of each of its results, for rows that were not handed over before.
        counts: counts of all finished rows of the shard.
        share: finished share of the shard's tokens, 0 to 1.
    """

    values: Mapping[Position, Sequence[Mapping[str, object]]]
    counts: RowCounts
    share: float


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Consecutive rows; where a shard ends depends only on the rows.

    Attributes:
        earlier: rows that an earlier process of the job has finished; they are not run again.
        on_partial: takes the rows that were finished since its last call, about every two seconds, and when an error
            ends the shard; None where they are not kept, as in another process.
    """

    rows: list[Row]
    earlier: PartialShard | None = None
    on_partial: Callable[[PartialShard], None] | None = None

    def __reduce__(self) -> tuple[Callable[[], Shard], tuple[()]]:
        return functools.partial(Shard, rows=self.rows, earlier=self.earlier), ()

    @property
    def end(self) -> Position:
        """The position at which the next shard begins."""
        return self.rows[-1].end


class FirstFailure(NamedTuple):
    """The first row of a shard that failed: its name in messages, and its error."""

    row: str
    error: Message


class ShardResult(NamedTuple):
    """The results of a shard and their counts; it can be pickled.

    Attributes:
        results: one dict per row, in order: ``id``, kept columns, columns of the task, ``tokens`` and ``error``, which
            is a `Message` or None. With late chunking one dict per chunk, or one for a row that failed.
        counts: counts of the rows, without the first error.
        first_failure: None if no row failed.
    """

    results: list[dict[str, Any]]
    counts: RowCounts
    first_failure: FirstFailure | None = None

    def written(self, writer: Writer) -> ShardResult:
        """The results with errors that are text, in the words of an interface."""
        if not self.counts.errors:
            return self
        results = [
            row if row["error"] is None else {**row, "error": write(row["error"], writer)} for row in self.results
        ]
        if self.first_failure is None:
            return ShardResult(results=results, counts=self.counts)
        first_error = f"{self.first_failure.row}: {write(self.first_failure.error, writer)}"
        return ShardResult(results=results, counts=replace(self.counts, first_error=first_error))


@runtime_checkable
class Stoppable(Protocol):
    """Shards that another thread may be waiting for."""

    def stop(self) -> None:
        """End the waiting, and the shards."""


class JobPool(Protocol):
    """One or more processes that run shards of about `shard_characters` characters.

    `computes_beside` says whether this process's cores are free meanwhile, for reading and writing.
    """

    shard_characters: int
    computes_beside: bool

    def map(self, shards: Iterator[Shard]) -> Generator[tuple[Shard, ShardResult], None, None]:
        """Run each shard once; results are in the order of the shards. A BackendError is not caused by the rows."""


def split_into_shards(rows: Iterable[Row | None], *, characters: int) -> Iterator[Shard]:
    """Split rows into groups that bound memory and are large enough for sorting by length.

    The row that reaches the number of characters is the last of its shard; None ends a shard, too.
    """
    max_rows = texts_of_window(characters)
    shard: list[Row] = []
    size = kept = 0
    for row in rows:
        if row is not None:
            shard.append(row)
            size += row.characters
            if row.kept:
                kept += _bytes_of(row.kept)
            if len(shard) < max_rows and size < characters and kept < _MAX_BYTES:
                continue
        if shard:
            yield Shard(rows=shard)
            shard, size, kept = [], 0, 0
    if shard:
        yield Shard(rows=shard)


def split_by_bytes(rows: Iterable[Values], *, max_bytes: int) -> Iterator[list[Values]]:
    """Split rows, with the values of their columns, into groups of about so many bytes, each of at least one row."""
    group: list[Values] = []
    size = 0
    for row in rows:
        group.append(row)
        size += _bytes_of(row)
        if size >= max_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def _bytes_of(row: Mapping[str, object]) -> int:
    """About how many bytes the values of a row have, however deep they are nested."""
    kept: Any = row.get(AS_COLUMNS)
    size = 0 if kept is None else kept.size_bytes
    # Every row has integers and an error, mostly None: to leave them out first takes a third of the time.
    left = [value for value in row.values() if value is not None and value is not kept and type(value) is not int]
    while left:
        value = left.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, np.ndarray):
            size += value.nbytes
        elif isinstance(value, Cell):
            size += int(pa.repeat(value.scalar, 1).nbytes)
        elif isinstance(value, list | dict):
            size += len(value)
            left += value
            left += value.values() if isinstance(value, dict) else ()
    return size
