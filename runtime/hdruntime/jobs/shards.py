"""Shards: groups of a job's rows that any process with a session can run, and running them."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import pyarrow as pa

from hdruntime.backends.registry import needs_gpu
from hdruntime.errors import BackendError, HdexportError, InputError, NonFiniteOutputError
from hdruntime.inference.overlapping import prefetched
from hdruntime.inference.scheduling import PaddingCount
from hdruntime.jobs.input_files import Cell
from hdruntime.jobs.kept_columns import AS_COLUMNS
from hdruntime.jobs.progress import RowCounts
from hdruntime.jobs.rows import ErrorKind, Position, Row
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.tasks.task import TaskOptions, TextTask
from hdruntime.tasks.text_inference import TextInference, TextItem, texts_of_window
from hdruntime.text.chunking import overlap_of
from hdruntime.text.encoding import Overflow
from hdruntime.text.prompts import chosen_prompt, prompts_of

if TYPE_CHECKING:
    from hdruntime.session import Session

_PART_SECONDS = 2.0
"""Time between two parts of a shard, which are kept and reported."""

_MOST_BYTES = 2**26
"""Kept columns of about this size end a shard."""

Values = TypeVar("Values", bound=Mapping[str, object])


@dataclass(frozen=True, kw_only=True)
class RowOptions(TaskOptions, EncodeOptions):
    """How shards are run, and the form of their results.

    Attributes:
        prompt: the prompt itself, in place of a `prompt_name`.
        overlap: tokens that consecutive macro chunks of a text share, with late chunking; None: 256, or a quarter of
            the session's tokens if that is less.
    """

    prompt: str | None = None
    overlap: int | None = None

    def check(self) -> None:
        """Refuse invalid options.

        Raises:
            InputError: an option is out of range, or does not fit another.
        """
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise InputError(
                f"--batch-tokens {self.batch_tokens} is too small.",
                hint="Use 1 or more, or leave it out for the backend's default.",
            )
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(
                f"--batch-size {self.batch_size} is too small.", hint="Use 1 or more texts, or leave it out."
            )
        if self.stride < 0:
            raise InputError(f"--stride {self.stride} is negative.", hint="Use 0 or more tokens.")
        if self.stride and self.overflow is not Overflow.SPLIT:
            raise InputError("--stride is for texts that are split.", hint="Add --overflow split, or leave it out.")
        if self.segment is not None and self.overflow is not Overflow.RECUR:
            raise InputError("--segment is for texts that are streamed.", hint="Add --overflow recur, or leave it out.")
        if self.prompt is not None and self.prompt_name is not None:
            raise InputError("--prompt and --prompt-name both define the prompt.", hint="Leave one of them out.")
        if self.late_chunking is not None and self.overflow is not Overflow.ERROR:
            raise InputError(
                f"--overflow {self.overflow.value} and --late-chunking contradict each other: late chunking reads long "
                "texts whole, in macro chunks.",
                hint="Leave out --overflow; set what macro chunks share with --overlap.",
            )
        if self.answers is not None:
            self.answers.check()
        if self.max_active_dims is not None and self.max_active_dims < 1:
            raise InputError(
                f"--max-active-dims {self.max_active_dims} keeps nothing of a vector.",
                hint="Use 1 or more, or leave it out for all values above 0.",
            )
        if self.overlap is not None and self.late_chunking is None:
            raise InputError(
                "--overlap is for late chunking.",
                hint="Add --late-chunking tokens:256, or type --overflow split --stride N.",
            )
        if self.overlap is not None and self.overlap < 0:
            raise InputError(f"--overlap {self.overlap} is negative.", hint="Use 0 or more tokens.")

    def chosen_prompt(self, task: TextTask) -> str:
        """The prompt before every text.

        Raises:
            InputError: the bundle has no prompt with that name, or the task has no prompts.
        """
        if (self.prompt or self.prompt_name) and not task.prompts:
            raise InputError(
                "Prompts are for texts that are embedded or classified; these rows are not.", hint="Leave it out."
            )
        name = task.role if self.prompt_name is None else self.prompt_name
        return chosen_prompt(*prompts_of(task.manifest), name=name, prompt=self.prompt)


class Part(NamedTuple):
    """Rows of a shard that are done before the whole shard is.

    Attributes:
        values: end of a row -> the task's values of each of its results, for rows that were not in an earlier part.
        counts: of all rows of the shard that are done.
        share: of the shard's tokens, 0 to 1.
    """

    values: Mapping[Position, Sequence[Mapping[str, object]]]
    counts: RowCounts
    share: float


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Consecutive rows; where a shard ends depends only on the rows.

    Attributes:
        done: the part that an earlier process of the job has done: its rows are not run again.
        on_part: takes the next part, about every two seconds, and when an error ends the shard; None where parts are
            not kept, as in another process.
    """

    rows: list[Row]
    done: Part | None = None
    on_part: Callable[[Part], None] | None = None

    def __reduce__(self) -> tuple[Callable[[], Shard], tuple[()]]:
        return functools.partial(Shard, rows=self.rows, done=self.done), ()

    @property
    def end(self) -> Position:
        """The place where the next shard begins."""
        return self.rows[-1].end


class ShardResult(NamedTuple):
    """The results of a shard and their counts; it can be pickled.

    One dict per row, in order: ``id``, kept columns, the task's, ``tokens`` and ``error``. With late chunking one per
    chunk, or one for a row that failed.
    """

    results: list[dict[str, object]]
    counts: RowCounts


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


class LocalPool:
    """Runs shards in this process, one after another.

    Args:
        session: that runs them.
        task: whose results are computed.
        options: default `RowOptions()`.
    """

    def __init__(self, session: Session, task: TextTask, *, options: RowOptions | None = None) -> None:
        self.computes_beside = needs_gpu(session.backend)
        self._infer = RowInference(session, task, options=options or RowOptions())
        self.shard_characters = self._infer.shard_characters

    def map(self, shards: Iterator[Shard]) -> Generator[tuple[Shard, ShardResult], None, None]:
        """Run every shard; see `JobPool`. Beside a GPU the next shard is read and tokenized meanwhile."""
        encoded = ((shard, self._infer.encode(shard.rows)) for shard in shards)
        stop = shards.stop if isinstance(shards, Stoppable) else None
        with prefetched(encoded, is_ahead=self.computes_beside, stop=stop) as ahead:
            for shard, items in ahead:
                yield shard, self._infer.run(shard, items)


class RowInference:
    """Runs rows with a session, and remembers whether the session has ever worked.

    Batches are smaller than the options say if their outputs would fill the memory. Rows are sorted by length within a
    shard, which should have about `shard_characters`; a killed job repeats what it did since the last part of one.
    """

    def __init__(self, session: Session, task: TextTask, *, options: RowOptions) -> None:
        prompt = options.chosen_prompt(task)
        if options.late_chunking is not None:
            length = session.tokenizer_of(options.max_seq_length).max_len
            options = replace(options, overflow=Overflow.SPLIT, stride=overlap_of(options.overlap, length))
        self._session, self._task = session, task
        self._inference = TextInference(session, task, options, prompt=prompt, on_batch=self._part_if_due)
        self._parts: _Parts | None = None
        self._is_cut = options.late_chunking is not None
        self._no_values = dict.fromkeys(field.name for field in task.fields())
        self.shard_characters = self._inference.window_characters

    def encode(self, rows: Sequence[Row]) -> list[TextItem]:
        """The tokens of each row that has no error."""
        return self._inference.encode([row for row in rows if row.error is None])

    def run(self, shard: Shard, items: Sequence[TextItem]) -> ShardResult:
        """Run the rows of a shard, of which `encode` gave the items, and compute the task's values.

        BackendError if every row failed, and so does one that ran before: the session is broken.
        """
        of_rows = iter(items)
        outcomes = [(row, None if row.error is not None else next(of_rows)) for row in shard.rows]
        parts = _Parts(shard, outcomes, self._session, self._task)
        # Texts that are streamed together are not told apart: which share a batch depends on those before.
        self._parts = None if shard.on_part is None or self._inference.batch_slots else parts
        try:
            self._inference.run(items)
        except BaseException:
            with contextlib.suppress(HdexportError, OSError):
                self._part_if_due(seconds=0.0)
            raise
        finally:
            self._parts = None
        counts = _counts(outcomes, parts.computed())
        results = [result for outcome in outcomes for result in self._results(*outcome)]
        return ShardResult(results=results, counts=counts)

    def _part_if_due(self, *, seconds: float | None = None) -> None:
        if self._parts is not None:
            self._parts.hand_over(_PART_SECONDS if seconds is None else seconds)

    def _results(self, row: Row, item: TextItem | None) -> Iterator[dict[str, object]]:
        shared = {"id": row.id, **row.kept}
        if item is None or item.error is not None:
            # How many tokens there are says nothing about chunks.
            encoding = None if item is None or self._is_cut else item.encoding
            tokens = None if encoding is None else len(encoding.whole)
            error = row.error if item is None else str(item.error)
            yield {**shared, **self._no_values, "tokens": tokens, "error": error}
            return
        assert item.encoding is not None, "what has an answer has an encoding"
        for values in item.answer.values if isinstance(item.answer, _Kept) else self._task.rows(item.answer):
            yield {**shared, **values, "tokens": values.get("tokens", len(item.encoding.whole)), "error": None}


class _Kept(NamedTuple):
    """Stands for an answer whose values an earlier process of the job has kept."""

    values: Sequence[Mapping[str, object]]


class _Parts:
    """The parts of a shard that runs."""

    def __init__(
        self, shard: Shard, outcomes: Sequence[tuple[Row, TextItem | None]], session: Session, task: TextTask
    ) -> None:
        self._shard, self._outcomes, self._session, self._task = shard, outcomes, session, task
        self._before = session.padding
        self._handed_over: set[Position] = set()
        self._latest = time.monotonic()
        kept = {} if shard.done is None else shard.done.values
        for row, item in outcomes:
            if item is not None and item.error is None and row.end in kept:
                item.answer = _Kept(kept[row.end])
                self._handed_over.add(row.end)

    def computed(self) -> PaddingCount:
        """Tokens that were run, in this process and in earlier ones."""
        before, after = self._before, self._session.padding
        earlier = RowCounts() if self._shard.done is None else self._shard.done.counts
        return PaddingCount(
            tokens=after.tokens - before.tokens + earlier.computed_tokens,
            padded_tokens=after.padded_tokens - before.padded_tokens + earlier.padded_tokens,
        )

    def hand_over(self, seconds: float) -> None:
        """Hand over the rows that were done since the last time, if that is so many seconds ago."""
        if self._shard.on_part is None or time.monotonic() - self._latest < seconds:
            return
        done = [(row, item) for row, item in self._outcomes if item is not None and item.answer is not None]
        fresh = [(row, item) for row, item in done if row.end not in self._handed_over]
        if fresh:
            counts = _counts(done, self.computed())
            items = [item for _, item in self._outcomes if item is not None and item.encoding is not None]
            tokens = sum(len(item.encoding.whole) for item in items if item.encoding is not None)
            self._shard.on_part(
                Part(
                    values={row.end: self._task.rows(item.answer) for row, item in fresh},
                    counts=counts,
                    share=counts.tokens / max(1, tokens),
                )
            )
            self._handed_over.update(row.end for row, _ in fresh)
        self._latest = time.monotonic()


def split_into_shards(rows: Iterable[Row | None], *, characters: int) -> Iterator[Shard]:
    """Cut rows into groups that bound memory and are large enough for sorting by length.

    The row that reaches the number of characters is the last of its shard; None ends a shard, too.
    """
    most = texts_of_window(characters)
    shard: list[Row] = []
    size = kept = 0
    for row in rows:
        if row is not None:
            shard.append(row)
            size += row.characters
            if row.kept:
                kept += _bytes_of(row.kept)
            if len(shard) < most and size < characters and kept < _MOST_BYTES:
                continue
        if shard:
            yield Shard(rows=shard)
            shard, size, kept = [], 0, 0
    if shard:
        yield Shard(rows=shard)


def cut_by_bytes(rows: Iterable[Values], *, most: int) -> Iterator[list[Values]]:
    """Cut rows, with the values of their columns, into groups of about so many bytes, each of at least one row."""
    group: list[Values] = []
    size = 0
    for row in rows:
        group.append(row)
        size += _bytes_of(row)
        if size >= most:
            yield group
            group, size = [], 0
    if group:
        yield group


def _counts(outcomes: Sequence[tuple[Row, TextItem | None]], computed: PaddingCount) -> RowCounts:
    items = [item for _, item in outcomes if item is not None]
    wholes = [item.encoding.whole for item in items if item.encoding is not None and item.error is None]
    failed = [(row, _failure(row, item)) for row, item in outcomes if item is None or item.error is not None]
    return RowCounts(
        rows=len(outcomes),
        tokens=sum(map(len, wholes)),
        computed_tokens=computed.tokens,
        padded_tokens=computed.padded_tokens,
        truncated_rows=sum(whole.is_truncated for whole in wholes),
        errors=dict(Counter(kind.value for _, (kind, _) in failed)),
        first_error=f"{_named(failed[0][0])}: {failed[0][1][1]}" if failed else None,
        dropped_columns=sorted({name for row, _ in outcomes for name in row.dropped}),
    )


def _named(row: Row) -> str:
    """The row by its id, or by its number from 0 where the id is null or could not be read."""
    return f"row number {row.end.row - 1}, which has no id" if row.id is None else f"row {row.id}"


def _failure(row: Row, item: TextItem | None) -> tuple[ErrorKind, str | None]:
    """Why a row has no values: the kind, and the message."""
    if item is None:
        return row.error_kind, row.error
    kind = ErrorKind.INPUT
    if isinstance(item.error, NonFiniteOutputError):
        kind = ErrorKind.NOT_FINITE
    elif isinstance(item.error, BackendError):
        kind = ErrorKind.BACKEND
    return kind, str(item.error)


def _bytes_of(row: Mapping[str, object]) -> int:
    """About how many bytes the values of a row have, however deep they are nested."""
    place: Any = row.get(AS_COLUMNS)
    size = 0 if place is None else place.size_bytes
    # Every row has integers and an error, mostly None: to leave them out first takes a third of the time.
    left = [value for value in row.values() if value is not None and value is not place and type(value) is not int]
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
