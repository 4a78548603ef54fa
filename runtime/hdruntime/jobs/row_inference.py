"""Runs the rows of shards with a session in this process."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from hdruntime.backends.registry import needs_gpu
from hdruntime.errors import BackendError, HdexportError, Message, NonFiniteOutputError, joined
from hdruntime.inference.overlapping import prefetched
from hdruntime.inference.scheduling import PaddingCount
from hdruntime.jobs.options import RowOptions
from hdruntime.jobs.progress import RowCounts
from hdruntime.jobs.rows import ErrorKind, Position, Row
from hdruntime.jobs.shards import FirstFailure, PartialShard, Shard, ShardResult, Stoppable
from hdruntime.tasks.task import TextTask
from hdruntime.tasks.text_inference import TextInference, TextItem
from hdruntime.text.chunking import overlap_of
from hdruntime.text.encoding import Overflow

if TYPE_CHECKING:
    from hdruntime.session import Session

_PARTIAL_SECONDS = 2.0
"""Seconds between two partial results of a shard, which are kept and reported."""


def fields_of_rows(task: TextTask, overflow: Overflow) -> tuple[pa.Field, ...]:
    """The columns of a result, but for the id and kept columns: the task's, ``tokens`` and ``error``.

    With ``truncate`` there are ``truncated``, and ``tokens_given``, the tokens before truncation: null if they were not
    counted, see :class:`hdruntime.text.encoding.Encoding`.
    """
    truncation = {"truncated": pa.bool_(), "tokens_given": pa.int32()} if overflow is Overflow.TRUNCATE else {}
    return (*task.fields(), *pa.schema({"tokens": pa.int32(), **truncation, "error": pa.string()}))


class LocalPool:
    """Runs shards in this process, one after another.

    Args:
        session: session that runs the texts.
        task: task whose results are computed.
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
    shard, which should have about `shard_characters`; a killed job repeats the rows that were not handed over.
    """

    def __init__(self, session: Session, task: TextTask, *, options: RowOptions) -> None:
        prompt = options.chosen_prompt(task)
        if options.late_chunking is not None:
            length = session.tokenizer_of(options.max_seq_length).max_len
            options = replace(options, overflow=Overflow.SPLIT, stride=overlap_of(options.overlap, length))
        self._session, self._task = session, task
        self._inference = TextInference(session, task, options, prompt=prompt, on_batch=self._hand_over_if_due)
        self._progress: _ShardProgress | None = None
        self._is_chunked = options.late_chunking is not None
        self._no_values = dict.fromkeys(field.name for field in fields_of_rows(task, options.overflow))
        self._says_truncation = options.overflow is Overflow.TRUNCATE
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
        progress = _ShardProgress(shard, outcomes, self._session, self._task)
        # Texts that are streamed together are not told apart: which share a batch depends on those before.
        self._progress = None if shard.on_partial is None or self._inference.batch_slots else progress
        try:
            self._inference.run(items)
        except BaseException:
            with contextlib.suppress(HdexportError, OSError):
                self._hand_over_if_due(seconds=0.0)
            raise
        finally:
            self._progress = None
        counts, first_failure = _counts(outcomes, progress.computed())
        results = [result for outcome in outcomes for result in self._results(*outcome)]
        return ShardResult(results=results, counts=counts, first_failure=first_failure)

    def _hand_over_if_due(self, *, seconds: float | None = None) -> None:
        if self._progress is not None:
            self._progress.hand_over(_PARTIAL_SECONDS if seconds is None else seconds)

    def _results(self, row: Row, item: TextItem | None) -> Iterator[dict[str, object]]:
        shared = {"id": row.id, **row.kept}
        if item is None or item.error is not None:
            # How many tokens there are says nothing about chunks.
            encoding = None if item is None or self._is_chunked else item.encoding
            tokens = None if encoding is None else len(encoding.whole)
            error = row.error if item is None or item.error is None else _message_of(item.error)
            yield {**shared, **self._no_values, "tokens": tokens, "error": error}
            return
        assert item.encoding is not None, "what has an answer has an encoding"
        whole = item.encoding.whole
        counts: dict[str, object] = {"tokens": len(whole)}
        if self._says_truncation:
            counts |= {"truncated": whole.is_truncated, "tokens_given": whole.given_tokens}
        for values in item.answer.values if isinstance(item.answer, _EarlierAnswer) else self._task.rows(item.answer):
            yield {**shared, **counts, **values, "error": None}


class _EarlierAnswer(NamedTuple):
    """Stands for an answer whose values an earlier process of the job has kept."""

    values: Sequence[Mapping[str, object]]


class _ShardProgress:
    """Hands over the finished rows of a shard that runs."""

    def __init__(
        self, shard: Shard, outcomes: Sequence[tuple[Row, TextItem | None]], session: Session, task: TextTask
    ) -> None:
        self._shard, self._outcomes, self._session, self._task = shard, outcomes, session, task
        self._before = session.padding
        self._handed_over: set[Position] = set()
        self._latest = time.monotonic()
        earlier = {} if shard.earlier is None else shard.earlier.values
        for row, item in outcomes:
            if item is not None and item.error is None and row.end in earlier:
                item.answer = _EarlierAnswer(earlier[row.end])
                self._handed_over.add(row.end)

    def computed(self) -> PaddingCount:
        """Tokens that were run, in this process and in earlier ones."""
        before, after = self._before, self._session.padding
        earlier = RowCounts() if self._shard.earlier is None else self._shard.earlier.counts
        return PaddingCount(
            tokens=after.tokens - before.tokens + earlier.computed_tokens,
            padded_tokens=after.padded_tokens - before.padded_tokens + earlier.padded_tokens,
        )

    def hand_over(self, seconds: float) -> None:
        """Hand over the rows that were done since the last time, if that is so many seconds ago."""
        if self._shard.on_partial is None or time.monotonic() - self._latest < seconds:
            return
        done = [(row, item) for row, item in self._outcomes if item is not None and item.answer is not None]
        fresh = [(row, item) for row, item in done if row.end not in self._handed_over]
        if fresh:
            counts, _ = _counts(done, self.computed())
            items = [item for _, item in self._outcomes if item is not None and item.encoding is not None]
            tokens = sum(len(item.encoding.whole) for item in items if item.encoding is not None)
            self._shard.on_partial(
                PartialShard(
                    values={row.end: self._task.rows(item.answer) for row, item in fresh},
                    counts=counts,
                    share=counts.tokens / max(1, tokens),
                )
            )
            self._handed_over.update(row.end for row, _ in fresh)
        self._latest = time.monotonic()


def _counts(
    outcomes: Sequence[tuple[Row, TextItem | None]], computed: PaddingCount
) -> tuple[RowCounts, FirstFailure | None]:
    items = [item for _, item in outcomes if item is not None]
    wholes = [item.encoding.whole for item in items if item.encoding is not None and item.error is None]
    failed = [(row, _failure(row, item)) for row, item in outcomes if item is None or item.error is not None]
    counts = RowCounts(
        rows=len(outcomes),
        tokens=sum(map(len, wholes)),
        computed_tokens=computed.tokens,
        padded_tokens=computed.padded_tokens,
        truncated_rows=sum(whole.is_truncated for whole in wholes),
        errors=dict(Counter(kind.value for _, (kind, _) in failed)),
        dropped_columns=sorted({name for row, _ in outcomes for name in row.dropped}),
    )
    return counts, FirstFailure(_named(failed[0][0]), failed[0][1][1]) if failed else None


def _named(row: Row) -> str:
    """The row by its id, or by its number from 0 where the id is null or could not be read."""
    return f"row number {row.end.row - 1}, which has no id" if row.id is None else f"row {row.id}"


def _failure(row: Row, item: TextItem | None) -> tuple[ErrorKind, Message]:
    """Why a row has no values: the kind, and the message."""
    if item is None or item.error is None:
        return row.error_kind, row.error or ""
    kind = ErrorKind.INPUT
    if isinstance(item.error, NonFiniteOutputError):
        kind = ErrorKind.NOT_FINITE
    elif isinstance(item.error, BackendError):
        kind = ErrorKind.BACKEND
    return kind, _message_of(item.error)


def _message_of(error: HdexportError) -> Message:
    return joined(error.problem, "\n", error.hint) if error.hint else error.problem
