"""Runs portions of rows in one process, with a result or an error for each row."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from hdruntime.errors import BackendError, NonFiniteOutputError
from hdruntime.inference.scheduling import PaddingCount
from hdruntime.jobs.portions import PORTION_CHARACTERS, Portion, PortionResult, RowOptions
from hdruntime.jobs.progress import RowCounts
from hdruntime.jobs.rows import ErrorKind, Row
from hdruntime.session import Session
from hdruntime.tasks.task import TextTask
from hdruntime.tasks.text_inference import TextInference, TextItem
from hdruntime.text.chunking import overlap_of
from hdruntime.text.tokenization import Overflow

_PORTION_CHARACTERS_PER_TOKEN = 8 * 4
"""Characters of a portion per token of a batch: of English, eight batches, each of rows of similar length."""

_LANE_CHARACTERS = 2**16
"""Characters of a portion per streamed row that runs at a time: about 16384 tokens, so that lanes are seldom empty."""

_MOST_CHARACTERS = 2**22
"""Upper bound on portion size; each token uses about 200 bytes."""


class LocalPool:
    """Runs portions in this process, one after another.

    Args:
        session: that runs them.
        task: whose results are computed.
        options: default `RowOptions()`.
    """

    def __init__(self, session: Session, task: TextTask, *, options: RowOptions | None = None) -> None:
        options = options or RowOptions()
        batch_tokens = options.batch_tokens or session.batch_tokens
        self._infer = RowInference(session, task, options=options)
        characters = max(PORTION_CHARACTERS, batch_tokens * _PORTION_CHARACTERS_PER_TOKEN)
        self.portion_characters = min(max(characters, self._infer.lanes * _LANE_CHARACTERS), _MOST_CHARACTERS)

    def map(self, portions: Iterator[Portion]) -> Iterator[tuple[Portion, PortionResult]]:
        """Run every portion; see `JobPool`."""
        for portion in portions:
            yield portion, self._infer(portion.rows)


class RowInference:
    """Runs rows with a session, and remembers whether the session has ever worked.

    Batches are smaller than the options say if their outputs would fill the memory. `lanes` is how many rows are
    streamed at a time, 0 if rows are not streamed.
    """

    def __init__(self, session: Session, task: TextTask, *, options: RowOptions) -> None:
        prompt = options.chosen_prompt(task)
        if options.late_chunking is not None:
            stride = overlap_of(options.overlap, session.max_len)
            options = dataclasses.replace(options, overflow=Overflow.SPLIT, stride=stride)
        self._session, self._task = session, task
        self._inference = TextInference(session, task, options, prompt=prompt)
        self._is_cut = options.late_chunking is not None
        self._no_values = dict.fromkeys(field.name for field in task.fields())
        self.lanes = self._inference.lanes

    def __call__(self, rows: Sequence[Row]) -> PortionResult:
        """Tokenise rows, run them, and compute the task's values.

        BackendError if every row failed, and so does one that ran before: the session is broken.
        """
        before = self._session.padding
        items = self._inference.encode([row for row in rows if row.error is None])
        self._inference.run(items)
        of_rows = iter(items)
        outcomes = [(row, None if row.error is not None else next(of_rows)) for row in rows]
        counts = _counts(outcomes, before, self._session.padding)
        results = [result for outcome in outcomes for result in self._results(*outcome)]
        return PortionResult(results=results, counts=counts)

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
        for values in self._task.rows(item.answer):
            yield {**shared, **values, "tokens": values.get("tokens", len(item.encoding.whole)), "error": None}


def _counts(outcomes: Sequence[tuple[Row, TextItem | None]], before: PaddingCount, after: PaddingCount) -> RowCounts:
    items = [item for _, item in outcomes if item is not None]
    wholes = [item.encoding.whole for item in items if item.encoding is not None and item.error is None]
    failed = [(row, _failure(row, item)) for row, item in outcomes if item is None or item.error is not None]
    return RowCounts(
        rows=len(outcomes),
        tokens=sum(map(len, wholes)),
        computed_tokens=after.tokens - before.tokens,
        padded_tokens=after.padded_tokens - before.padded_tokens,
        cut_rows=sum(whole.is_cut for whole in wholes),
        errors=dict(Counter(kind.value for _, (kind, _) in failed)),
        first_error=f"row {failed[0][0].id}: {failed[0][1][1]}" if failed else None,
        dropped_columns=sorted({name for row, _ in outcomes for name in row.dropped}),
    )


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
