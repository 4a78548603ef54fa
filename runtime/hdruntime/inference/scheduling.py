"""Running rows of different lengths batch by batch, in the memory there is, and telling bad rows from good ones."""

from __future__ import annotations

__all__ = ["BatchResult", "PaddingCount", "Scheduler", "non_finite_rows"]

import contextlib
import functools
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from hdruntime.backends import Runner
from hdruntime.errors import BackendError, HdexportError, NonFiniteOutputError, OutOfMemoryError
from hdruntime.inference.batching import pack_by_tokens
from hdruntime.inference.forking import keep_for_ever, tell_of_forks
from hdruntime.inference.memory_limits import MemoryLimits

logger = logging.getLogger(__name__)

IntArray = npt.NDArray[np.int64]
Inputs = Mapping[str, npt.NDArray[Any]]
Outputs = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """What became of a batch.

    Attributes:
        rows: indices of the batch's rows among all that were given.
        attention_mask: int64 [batch, tokens], 1 for real tokens, 0 for padding.
        outputs: output name -> float32 [batch, ...] of the shape in the manifest. What failed rows hold means nothing;
            where every row failed there may be no outputs.
        errors: index among all rows that were given -> why that row has no result.
    """

    rows: list[int]
    attention_mask: IntArray
    outputs: Outputs
    errors: dict[int, HdexportError]


@dataclass(frozen=True, kw_only=True)
class PaddingCount:
    """Tokens that were computed: ``tokens`` of texts, and ``padded_tokens`` of padding beside them."""

    tokens: int
    padded_tokens: int


class Scheduler:
    """Feeds a runner, and remembers what it learns of the memory. Safe to use from several threads.

    Args:
        runner: what runs batches; the scheduler closes it.
        mask: name of the input that tells real tokens from padding.
        padding_limit: tokens of a row -> the most that it may be padded to with its answer as it was.
        non_finite_error: (output name, row numbers, which may be none) -> the error of rows that hold NaN or infinity.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        mask: str,
        padding_limit: Callable[[int], int],
        non_finite_error: Callable[[str, Sequence[int]], NonFiniteOutputError],
    ) -> None:
        self.memory = MemoryLimits()
        self._mask = mask
        # Rows of one length share any batch that is not padded, and of one limit any batch.
        self.alike = _own_length if runner.prefers_equal_lengths else padding_limit
        self._runner: Runner | None = runner
        self._non_finite_error = non_finite_error
        self._lock = threading.Lock()
        self._no_runner = "The session is closed; load the bundle again."
        tell_of_forks(self)
        self._tokens = 0
        self._padded_tokens = 0

    @property
    def runner(self) -> Runner:
        """What runs batches.

        Raises:
            BackendError: it is closed, or this process was forked of the one that opened it.
        """
        runner = self._runner
        if runner is None:
            raise BackendError(self._no_runner)
        return runner

    @property
    def padding(self) -> PaddingCount:
        """What was computed so far."""
        with self._lock:
            return PaddingCount(tokens=self._tokens, padded_tokens=self._padded_tokens)

    def run(
        self,
        lengths: Sequence[int],
        inputs_of: Callable[[list[int]], Inputs],
        *,
        outputs: Sequence[str],
        batch_tokens: int | None,
        batch_size: int | None = None,
    ) -> Iterator[BatchResult]:
        """Run rows, the longest first, with as many batches under way as the runner wants.

        A row's answer does not depend on the others: rows share a batch only where the padding changes none. A batch
        that gets no memory is halved, and rows of such lengths go in smaller batches from then on. A batch that fails
        otherwise is run row by row.

        Args:
            lengths: tokens of each row.
            inputs_of: indices of rows, the longest first -> their inputs, checked, as the manifest has them.
            outputs: names of the outputs wanted.
            batch_tokens: most tokens of a batch, padding included; a longer row goes alone. None: what suits the
                runner.
            batch_size: most rows of a batch; None: any number.

        Yields:
            each row in one result; a row that failed alone, or holds NaN or infinity, with its error.

        Raises:
            InputError: ``batch_tokens`` is less than 1; raised at once, not at the first result.
            BackendError: the session is closed.
            OutOfMemoryError: nothing ever fitted, or a row no longer fits that did.
        """
        # Packed here rather than in the generator, so that what is wrong shows before the first result is asked for.
        return _Run(self, lengths, inputs_of, outputs, batch_tokens, batch_size).results()

    def most_rows(self, tokens: int) -> int:
        """Rows of that length that one batch may have, as far as is known; ``sys.maxsize`` where none are too many."""
        return min(self.runner.most_rows(tokens), self.memory.most_rows(tokens))

    def run_batch(self, inputs: Inputs, *, outputs: Sequence[str]) -> BatchResult:
        """Run one batch as it is given; in parts only where it is too large for the runner or the memory.

        Args:
            inputs: checked, as the manifest has them.
            outputs: names of the outputs wanted.

        Raises:
            BackendError: the backend failed, or the session is closed.
            OutOfMemoryError: nothing ever fitted, or a row no longer fits that did.
        """
        runner = self.runner
        mask = self.mask_of(inputs)
        batch, tokens = mask.shape
        if batch <= self.most_rows(tokens):
            try:
                started = runner.start(inputs, outputs)
                return self.finished(_Batch(list(range(batch)), inputs, mask, started, False))
            except OutOfMemoryError:
                if batch == 1:
                    raise
                self.memory.halve(batch, tokens)
        parts = self.run(
            [tokens] * batch,
            lambda rows: {name: array[rows] for name, array in inputs.items()},
            outputs=outputs,
            batch_tokens=batch * tokens,
        )
        return _joined(list(parts), mask)

    def mask_of(self, inputs: Inputs) -> IntArray:
        """int64 [batch, tokens], 1 for real tokens."""
        return inputs[self._mask]

    def close(self) -> None:
        """Close the runner: runs under way in other threads raise BackendError."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def forked(self) -> None:
        """Give up the runner, in a process that was forked: its threads and its GPU context are the parent's."""
        runner, self._runner = self._runner, None
        if runner is not None:
            keep_for_ever(runner)
            self._no_runner = (
                f"This session was loaded in another process ({os.getppid()}), of which this one is a fork; neither "
                "threads nor GPU contexts are forked.\n"
                'Load the bundle in this process, or start it otherwise: multiprocessing.get_context("spawn").'
            )
        # Another thread of the parent may have held it.
        self._lock = threading.Lock()

    def finished(self, batch: _Batch) -> BatchResult:
        """Wait for a batch, count its tokens and find its bad rows.

        Raises:
            BackendError: it failed.
        """
        outputs = batch.results()
        mask = batch.attention_mask
        self.memory.note_success(mask.shape[1])
        self._count(mask)
        errors: dict[int, HdexportError] = {}
        for name, wrong in non_finite_rows(outputs).items():
            for index in wrong:
                errors.setdefault(batch.rows[index], self._non_finite_error(name, []))
        return BatchResult(rows=batch.rows, attention_mask=mask, outputs=outputs, errors=errors)

    def _count(self, attention_mask: IntArray) -> None:
        tokens = int(np.count_nonzero(attention_mask))
        padded = self.runner.computed_tokens(attention_mask) - tokens
        with self._lock:
            self._tokens += tokens
            self._padded_tokens += padded


def non_finite_rows(outputs: Outputs) -> dict[str, list[int]]:
    """Output name -> indices of the batch's rows that hold NaN or infinity, for the outputs that have such rows."""
    found = {}
    for name, values in outputs.items():
        # The extremes take no memory, and are NaN where anything is.
        if not (values.min() > -np.inf and values.max() < np.inf):
            found[name] = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1)).tolist()
    return found


@dataclass(frozen=True)
class _Batch:
    rows: list[int]
    inputs: Inputs
    attention_mask: IntArray
    results: Callable[[], Outputs]
    had_company: bool


class _Run:
    """One call's rows on their way; used by one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        lengths: Sequence[int],
        inputs_of: Callable[[list[int]], Inputs],
        outputs: Sequence[str],
        batch_tokens: int | None,
        batch_size: int | None,
    ) -> None:
        self._scheduler = scheduler
        self._batch_size = batch_size
        self._lengths = lengths
        self._inputs_of = inputs_of
        self._outputs = outputs
        self._batch_tokens = scheduler.runner.batch_tokens if batch_tokens is None else batch_tokens
        self._waiting = self._packed(range(len(lengths)))
        self._in_flight: deque[_Batch] = deque()
        self._most_in_flight = scheduler.runner.most_in_flight

    def results(self) -> Iterator[BatchResult]:
        no_memory: BackendError | None = None
        try:
            while self._waiting or self._in_flight:
                if self._waiting and len(self._in_flight) < self._most_in_flight:
                    self._start_next()
                    continue
                batch = self._in_flight.popleft()
                try:
                    result = self._scheduler.finished(batch)
                except BackendError as error:
                    if self._will_retry(batch, error):
                        continue
                    no_memory = error if isinstance(error, OutOfMemoryError) else no_memory
                    yield _failed(batch, error)
                else:
                    yield result
            if no_memory is not None and not self._scheduler.memory.longest_row:
                raise no_memory
        finally:
            # What was started is finished, also where the caller wants no more.
            for batch in self._in_flight:
                with contextlib.suppress(BackendError):
                    _ = self._scheduler.runner  # none in a fork, where nothing is waited for
                    batch.results()

    def _start_next(self) -> None:
        """Begin a batch; what goes wrong is raised when its results are asked for, whenever it did."""
        rows = self._waiting.popleft()
        inputs = self._inputs_of(rows)
        try:
            results = self._scheduler.runner.start(inputs, self._outputs)
        except BackendError as error:
            results = functools.partial(_raise, error)
        mask = self._scheduler.mask_of(inputs)
        self._in_flight.append(_Batch(rows, inputs, mask, results, bool(self._in_flight)))

    def _will_retry(self, batch: _Batch, error: BackendError) -> bool:
        """Put what is worth another try in front of what is waiting."""
        rows, tokens = batch.rows, self._lengths[batch.rows[0]]
        _ = self._scheduler.runner  # Raises where the session was closed meanwhile: no row is to blame.
        logger.info("a batch of %d x %d tokens failed: %s", len(rows), tokens, error)
        if not isinstance(error, OutOfMemoryError):
            if len(rows) > 1:
                self._waiting.extendleft([row] for row in reversed(rows))
            return len(rows) > 1
        if len(rows) > 1:
            self._scheduler.memory.halve(len(rows), tokens)
            self._waiting = self._packed(chain(rows, *self._waiting))
            return True
        if batch.had_company or self._in_flight:
            # It may fit when nothing else is under way.
            self._most_in_flight = 1
            self._waiting.appendleft(rows)
            return True
        if tokens <= self._scheduler.memory.longest_row:
            raise error
        return False

    def _packed(self, rows: Iterable[int]) -> deque[list[int]]:
        """Batches as large as the memory allows, as far as is known."""
        rows = list(rows)
        batches = pack_by_tokens(
            [self._lengths[row] for row in rows],
            batch_tokens=self._batch_tokens,
            alike=self._scheduler.alike,
            most_rows=lambda tokens: min(self._scheduler.most_rows(tokens), self._batch_size or sys.maxsize),
        )
        return deque([rows[index] for index in batch] for batch in batches)


def _joined(parts: list[BatchResult], attention_mask: IntArray) -> BatchResult:
    """One batch's result from those of its rows."""
    outputs: Outputs = {}
    for part in parts:
        for name, values in part.outputs.items():
            shape = (len(attention_mask), *values.shape[1:])
            outputs.setdefault(name, np.zeros(shape, values.dtype))[part.rows] = values
    errors = {row: error for part in parts for row, error in part.errors.items()}
    return BatchResult(
        rows=list(range(len(attention_mask))), attention_mask=attention_mask, outputs=outputs, errors=errors
    )


def _failed(batch: _Batch, error: BackendError) -> BatchResult:
    errors: dict[int, HdexportError] = dict.fromkeys(batch.rows, error)
    return BatchResult(rows=batch.rows, attention_mask=batch.attention_mask, outputs={}, errors=errors)


def _own_length(tokens: int) -> int:
    return tokens


def _raise(error: BackendError) -> Outputs:
    raise error
