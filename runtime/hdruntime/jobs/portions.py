"""Portions: groups of a job's rows that any process with a session can run, and running them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from hdruntime.backends.registry import needs_gpu
from hdruntime.errors import BackendError, InputError, NonFiniteOutputError
from hdruntime.inference.overlapping import made_ahead
from hdruntime.inference.scheduling import PaddingCount
from hdruntime.jobs.input_files import Cell
from hdruntime.jobs.kept_columns import AS_COLUMNS
from hdruntime.jobs.progress import RowCounts
from hdruntime.jobs.rows import ErrorKind, Position, Row
from hdruntime.tasks.reading import Reading
from hdruntime.tasks.task import TaskOptions, TextTask
from hdruntime.tasks.text_inference import TextInference, TextItem, texts_of_window
from hdruntime.text.chunking import overlap_of
from hdruntime.text.prompts import chosen_prompt, prompts_of
from hdruntime.text.tokenization import Overflow

if TYPE_CHECKING:
    from hdruntime.session import Session

_MOST_BYTES = 2**26
"""Kept columns of about this size end a portion."""

Values = TypeVar("Values", bound=Mapping[str, object])


@dataclass(frozen=True, kw_only=True)
class RowOptions(TaskOptions, Reading):
    """How portions are run, and the form of their results.

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
                f"--batch-tokens {self.batch_tokens} is too small.\n"
                "Use 1 or more, or leave it out for the backend's default."
            )
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"--batch-size {self.batch_size} is too small.\nUse 1 or more texts, or leave it out.")
        if self.stride < 0:
            raise InputError(f"--stride {self.stride} is negative.\nUse 0 or more tokens.")
        if self.stride and self.overflow is not Overflow.SPLIT:
            raise InputError("--stride is for texts that are split.\nAdd --overflow split, or leave it out.")
        if self.segment is not None and self.overflow is not Overflow.RECUR:
            raise InputError("--segment is for texts that are streamed.\nAdd --overflow recur, or leave it out.")
        if self.prompt is not None and self.prompt_name is not None:
            raise InputError("--prompt and --prompt-name both define the prompt.\nLeave one of them out.")
        if self.late_chunking is not None and self.overflow is not Overflow.ERROR:
            raise InputError(
                f"--overflow {self.overflow.value} and --late-chunking contradict each other: late chunking reads long "
                "texts whole, in macro chunks.\nLeave out --overflow; set what macro chunks share with --overlap."
            )
        if self.answers is not None:
            self.answers.check()
        if self.max_active_dims is not None and self.max_active_dims < 1:
            raise InputError(
                f"--max-active-dims {self.max_active_dims} keeps nothing of a vector.\n"
                "Use 1 or more, or leave it out for all values above 0."
            )
        if self.overlap is not None and self.late_chunking is None:
            raise InputError(
                "--overlap is for late chunking.\nAdd --late-chunking tokens:256, or type --overflow split --stride N."
            )
        if self.overlap is not None and self.overlap < 0:
            raise InputError(f"--overlap {self.overlap} is negative.\nUse 0 or more tokens.")

    def chosen_prompt(self, task: TextTask) -> str:
        """The prompt before every text.

        Raises:
            InputError: the bundle has no prompt with that name, or the task has no prompts.
        """
        if (self.prompt or self.prompt_name) and not task.prompts:
            raise InputError(
                "Prompts are for texts that are embedded or classified; these rows are not.\nLeave it out."
            )
        name = task.default_prompt_name if self.prompt_name is None else self.prompt_name
        return chosen_prompt(*prompts_of(task.manifest), name=name, prompt=self.prompt)


@dataclass(frozen=True, kw_only=True)
class Portion:
    """Consecutive rows; where a portion ends depends only on the rows."""

    rows: list[Row]

    @property
    def end(self) -> Position:
        """The place where the next portion begins."""
        return self.rows[-1].end


class PortionResult(NamedTuple):
    """The results of a portion and their counts; it can be pickled.

    One dict per row, in order: ``id``, kept columns, the task's, ``tokens`` and ``error``. With late chunking one per
    chunk, or one for a row that failed.
    """

    results: list[dict[str, object]]
    counts: RowCounts


class JobPool(Protocol):
    """One or more processes that run portions of about `portion_characters` characters.

    `computes_beside` says whether this process's cores are free meanwhile, for reading and writing.
    """

    portion_characters: int
    computes_beside: bool

    def map(self, portions: Iterator[Portion]) -> Generator[tuple[Portion, PortionResult], None, None]:
        """Run each portion once; results are in the order of the portions. A BackendError is not caused by the rows."""


class LocalPool:
    """Runs portions in this process, one after another.

    Args:
        session: that runs them.
        task: whose results are computed.
        options: default `RowOptions()`.
    """

    def __init__(self, session: Session, task: TextTask, *, options: RowOptions | None = None) -> None:
        self.computes_beside = needs_gpu(session.backend)
        self._infer = RowInference(session, task, options=options or RowOptions())
        self.portion_characters = self._infer.portion_characters

    def map(self, portions: Iterator[Portion]) -> Generator[tuple[Portion, PortionResult], None, None]:
        """Run every portion; see `JobPool`. Beside a GPU the next portion is read and tokenized meanwhile."""
        encoded = ((portion, self._infer.encode(portion.rows)) for portion in portions)
        with made_ahead(encoded, is_ahead=self.computes_beside) as ahead:
            for portion, items in ahead:
                yield portion, self._infer.run(portion.rows, items)


class RowInference:
    """Runs rows with a session, and remembers whether the session has ever worked.

    Batches are smaller than the options say if their outputs would fill the memory. Rows are sorted by length within a
    portion, which should have about `portion_characters`; a killed job repeats at most one.
    """

    def __init__(self, session: Session, task: TextTask, *, options: RowOptions) -> None:
        prompt = options.chosen_prompt(task)
        if options.late_chunking is not None:
            length = session.tokenizer_of(options.max_seq_length).max_len
            options = replace(options, overflow=Overflow.SPLIT, stride=overlap_of(options.overlap, length))
        self._session, self._task = session, task
        self._inference = TextInference(session, task, options, prompt=prompt)
        self._is_cut = options.late_chunking is not None
        self._no_values = dict.fromkeys(field.name for field in task.fields())
        self.portion_characters = self._inference.window_characters

    def encode(self, rows: Sequence[Row]) -> list[TextItem]:
        """The tokens of each row that has no error."""
        return self._inference.encode([row for row in rows if row.error is None])

    def run(self, rows: Sequence[Row], items: Sequence[TextItem]) -> PortionResult:
        """Run rows, of which `encode` gave the items, and compute the task's values.

        BackendError if every row failed, and so does one that ran before: the session is broken.
        """
        before = self._session.padding
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


def cut_portions(rows: Iterable[Row], *, characters: int) -> Iterator[Portion]:
    """Cut rows into groups that bound memory and are large enough for sorting by length.

    The row that reaches the number of characters is the last of its portion.
    """
    most = texts_of_window(characters)
    portion: list[Row] = []
    size = kept = 0
    for row in rows:
        portion.append(row)
        size += row.characters
        if row.kept:
            kept += _bytes_of(row.kept)
        if len(portion) >= most or size >= characters or kept >= _MOST_BYTES:
            yield Portion(rows=portion)
            portion, size, kept = [], 0, 0
    if portion:
        yield Portion(rows=portion)


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
