"""Runs rows of different lengths in batches that fit in memory, with an error per failed row."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from hdruntime.arrays import Inputs, IntArray, Outputs
from hdruntime.backends import RecurrentStates, Runner
from hdruntime.backends.forking import keep_for_ever, tell_of_forks
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import BackendError, HdexportError, NonFiniteOutputError, OutOfMemoryError
from hdruntime.inference.batching import MemoryLimits
from hdruntime.packing import pack_by_tokens

logger = logging.getLogger(__name__)

_CHECKED_VALUES = 2**18
"""Values per block that are checked for NaN and infinity."""


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """The result of a batch.

    Attributes:
        rows: indices of the batch's rows among all rows of the call.
        attention_mask: int64 [batch, tokens], 1 for real tokens, 0 for padding.
        outputs: output name -> float32 [batch, ...] of the shape in the manifest. Values of failed rows are undefined;
            if every row failed there may be no outputs.
        errors: index among all rows of the call -> error of the row.
    """

    rows: list[int]
    attention_mask: IntArray
    outputs: Outputs
    errors: dict[int, HdexportError]


@dataclass(frozen=True, kw_only=True)
class PaddingCount:
    """Computed tokens: ``tokens`` of texts, and ``padded_tokens`` of padding."""

    tokens: int
    padded_tokens: int


class Scheduler:
    """Batches rows for a runner, within its memory. Safe to use from several threads.

    Args:
        runner: runs the batches; closed by the scheduler.
        mask: name of the attention mask.
        padding_limit: tokens of a row -> maximum tokens to which it may be padded without changing its outputs.
        non_finite_error: (output name, row numbers, may be empty) -> error of rows with NaN or infinity.
        room: default of the maximum tokens per batch, by free memory.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        mask: str,
        padding_limit: Callable[[int], int],
        non_finite_error: Callable[[str, Sequence[int]], NonFiniteOutputError],
        room: int = sys.maxsize,
    ) -> None:
        self.memory = MemoryLimits(room)
        self._mask = mask
        self.padding_limit = padding_limit
        self._runner: Runner | None = runner
        self._non_finite_error = non_finite_error
        self._lock = threading.Lock()
        self._no_runner = "The session is closed; load the bundle again."
        tell_of_forks(self)
        self._tokens = 0
        self._padded_tokens = 0

    @property
    def runner(self) -> Runner:
        """The runner; a BackendError if the session is closed or this process is a fork."""
        runner = self._runner
        if runner is None:
            raise BackendError(self._no_runner)
        return runner

    @property
    def batch_tokens(self) -> int:
        """Default of the maximum tokens per batch: the runner's, or fewer by free memory."""
        return min(self.runner.batch_tokens, self.memory.batch_tokens)

    @property
    def padding(self) -> PaddingCount:
        """Tokens computed so far."""
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
        done: Collection[int] = (),
    ) -> Iterator[BatchResult]:
        """Run rows, the longest first, with the runner's preferred number of batches in flight.

        Outputs of a row do not depend on other rows: rows share a batch only if padding changes no output. A batch that
        does not fit in memory is halved, and rows of such lengths run in smaller batches from then on. A batch that
        fails otherwise is run row by row. Each row is in one result; a row that fails alone, or has NaN or infinity,
        has an error there. OutOfMemoryError is raised if no batch ever fitted, or a row does not fit whose length
        fitted before.

        Args:
            lengths: tokens of each row.
            inputs_of: indices of rows, the longest first -> their checked inputs, as in the manifest.
            outputs: names of outputs.
            batch_tokens: maximum tokens per batch, padding included; a longer row runs alone. None for the property
                `batch_tokens`. A number less than 1 is rejected before the first result.
            batch_size: maximum rows per batch; None for any number.
            done: rows that need no result. They do not change the batches; batches of such rows only are skipped.
        """
        # Packed here rather than in the generator, so that errors are raised before the first result is requested.
        return _Run(self, lengths, inputs_of, outputs, batch_tokens, batch_size, done).results()

    def max_rows(self, tokens: int) -> int:
        """Maximum rows of a length per batch, as far as known; ``sys.maxsize`` without a limit."""
        return min(self.runner.max_rows(tokens), self.memory.max_rows(tokens))

    def run_batch(self, inputs: Inputs, *, outputs: Sequence[str]) -> BatchResult:
        """Run one batch of checked inputs, in parts if it is too large for the runner or the memory."""
        runner = self.runner
        mask = self.mask_of(inputs)
        batch, tokens = mask.shape
        if batch <= self.max_rows(tokens):
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

    def run_on(self, states: RecurrentStates, inputs: Inputs, *, outputs: Sequence[str]) -> BatchResult:
        """Run one segment of each row on the states that the runner carries; the inputs are without them."""
        _ = self.runner  # raises if it is closed
        mask = self.mask_of(inputs)
        results = states.run(inputs, outputs)
        return self._finished(list(range(len(mask))), mask, results, states.computed_tokens(mask))

    def mask_of(self, inputs: Inputs) -> IntArray:
        """int64 [batch, tokens], 1 for real tokens."""
        return inputs[self._mask]

    def close(self) -> None:
        """Close the runner: runs in other threads raise BackendError."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def forked(self) -> None:
        """Give up the runner in a forked process: its threads and its GPU context belong to the parent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            keep_for_ever(runner)
            # Others run in no fork of a process that ran them: see `threads_are_lost` and `no_gpu_reason`.
            by = "" if runner.backend is Backend.ONNXRUNTIME else f" with the backend {Backend.ONNXRUNTIME.value}"
            self._no_runner = (
                f"This session was loaded in another process ({os.getppid()}), and this one is a fork of it; a fork "
                "copies neither threads nor GPU contexts.\n"
                f'Load the bundle in this process{by}, or do not fork: multiprocessing.get_context("spawn").'
            )
        # Another thread of the parent may hold the old lock.
        self._lock = threading.Lock()

    def finished(self, batch: _Batch) -> BatchResult:
        """Wait for a batch, count its tokens and find its failed rows."""
        outputs, mask = batch.results(), batch.attention_mask
        return self._finished(batch.rows, mask, outputs, self.runner.computed_tokens(mask))

    def _finished(self, rows: list[int], mask: IntArray, outputs: Outputs, computed_tokens: int) -> BatchResult:
        self.memory.note_success(mask.shape[1])
        tokens = int(np.count_nonzero(mask))
        with self._lock:
            self._tokens += tokens
            self._padded_tokens += computed_tokens - tokens
        errors: dict[int, HdexportError] = {}
        for name, wrong in non_finite_rows(outputs).items():
            for index in wrong:
                errors.setdefault(rows[index], self._non_finite_error(name, []))
        return BatchResult(rows=rows, attention_mask=mask, outputs=outputs, errors=errors)


def non_finite_rows(outputs: Outputs) -> dict[str, list[int]]:
    """Output name -> indices of rows with NaN or infinity, for outputs with such rows."""
    non_finite = {}
    for name, values in outputs.items():
        # In blocks of rows, whose booleans fit into the cache.
        step = max(1, _CHECKED_VALUES // max(1, math.prod(values.shape[1:])))
        if not all(np.isfinite(values[first : first + step]).all() for first in range(0, len(values), step)):
            non_finite[name] = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1)).tolist()
    return non_finite


@dataclass(frozen=True)
class _Batch:
    rows: list[int]
    inputs: Inputs
    attention_mask: IntArray
    results: Callable[[], Outputs]
    had_company: bool


class _Run:
    """The progress of one call; used by one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        lengths: Sequence[int],
        inputs_of: Callable[[list[int]], Inputs],
        outputs: Sequence[str],
        batch_tokens: int | None,
        batch_size: int | None,
        done: Collection[int],
    ) -> None:
        self._scheduler = scheduler
        self._batch_size = batch_size
        self._lengths = lengths
        self._inputs_of = inputs_of
        self._outputs = outputs
        self._batch_tokens = scheduler.batch_tokens if batch_tokens is None else batch_tokens
        batches = self._packed(range(len(lengths)))
        self._waiting = deque(rows for rows in batches if not all(row in done for row in rows)) if done else batches
        self._in_flight: deque[_Batch] = deque()
        self._most_in_flight = scheduler.runner.max_in_flight

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
                    errors: dict[int, HdexportError] = dict.fromkeys(batch.rows, error)
                    yield BatchResult(rows=batch.rows, attention_mask=batch.attention_mask, outputs={}, errors=errors)
                else:
                    yield result
            if no_memory is not None and not self._scheduler.memory.longest_row:
                raise no_memory
        finally:
            # Started batches are finished even if the caller stops early.
            for batch in self._in_flight:
                with contextlib.suppress(BackendError):
                    _ = self._scheduler.runner  # raises in a fork, which must not wait for the parent's batches
                    batch.results()

    def _start_next(self) -> None:
        """Begin a batch; its errors are raised when its results are requested."""
        rows = self._waiting.popleft()
        inputs = self._inputs_of(rows)
        try:
            results = self._scheduler.runner.start(inputs, self._outputs)
        except BackendError as error:
            results = functools.partial(_raise, error)
        mask = self._scheduler.mask_of(inputs)
        self._in_flight.append(_Batch(rows, inputs, mask, results, bool(self._in_flight)))

    def _will_retry(self, batch: _Batch, error: BackendError) -> bool:
        """Put the rows that are worth another try in front of the waiting ones."""
        rows, tokens = batch.rows, self._lengths[batch.rows[0]]
        _ = self._scheduler.runner  # Raises if the session was closed meanwhile: no row is to blame.
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
            # The batch may fit when no other batch is in flight.
            self._most_in_flight = 1
            self._waiting.appendleft(rows)
            return True
        if tokens <= self._scheduler.memory.longest_row:
            raise error
        return False

    def _packed(self, rows: Iterable[int]) -> deque[list[int]]:
        """Batches as large as the known memory limits allow."""
        rows = list(rows)
        batches = pack_by_tokens(
            [self._lengths[row] for row in rows],
            batch_tokens=self._batch_tokens,
            padding_key=self._scheduler.padding_limit,
            max_padding=self._scheduler.runner.max_padding,
            max_rows=lambda tokens: min(self._scheduler.max_rows(tokens), self._batch_size or sys.maxsize),
            # More tokens make a batch no faster, so that padding is a loss.
            full_tokens=self._scheduler.runner.batch_tokens,
        )
        return deque([rows[index] for index in batch] for batch in batches)


def _joined(parts: list[BatchResult], attention_mask: IntArray) -> BatchResult:
    """One batch's result from the results of its parts."""
    outputs: Outputs = {}
    for part in parts:
        for name, values in part.outputs.items():
            shape = (len(attention_mask), *values.shape[1:])
            outputs.setdefault(name, np.zeros(shape, values.dtype))[part.rows] = values
    errors = {row: error for part in parts for row, error in part.errors.items()}
    return BatchResult(
        rows=list(range(len(attention_mask))), attention_mask=attention_mask, outputs=outputs, errors=errors
    )


def _raise(error: BackendError) -> Outputs:
    raise error
