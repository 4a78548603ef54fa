"""A backend that computes nothing: it answers at once, or when a GPU of a given rate would have computed.

In a process that called `add_stand_in`, ``--backend stand_in`` runs any bundle.
Its answers are numbers of the right shapes without meaning; what is left to measure is all that a bundle costs besides
computing.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

import hdruntime
import hdruntime.backends
from hdruntime.backends import Runner
from hdruntime.backends.entry import BackendEntry, LoadOptions, UnavailableReason
from hdruntime.backends.registry import backends
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendError

STAND_IN = "stand_in"
"""Name of the backend."""

_BATCH_TOKENS = 16384
"""Tokens of a batch by default, as of the backends for GPUs."""

_ACTIVE = 200
"""Weights of a sparse vector that are not 0, of a text of a hundred words."""

_ROWS_WITHOUT_REPETITION = 256


def add_stand_in() -> None:
    """Add the folder of the stand-in to the backends of this process."""
    folder = str(Path(__file__).with_name("backends"))
    if folder not in hdruntime.backends.__path__:
        hdruntime.backends.__path__.append(folder)
    backends.cache_clear()


class Pace(NamedTuple):
    """How fast the stand-in answers, and how many batches one caller keeps in flight.

    Attributes:
        tokens_per_second: padding included; None answers at once.
    """

    tokens_per_second: float | None = None
    in_flight: int = 2


class Batch(NamedTuple):
    """A batch that the stand-in has run: its shape, its tokens without padding, and when it computed them."""

    rows: int
    longest: int
    tokens: int
    began: float
    ended: float


class StandInBackend(BackendEntry):
    """Opens every bundle, and says that it runs on a GPU: sessions then do as they do there.

    Attributes:
        pace: of the runners that are opened next.
        opened: all runners, the latest last.
    """

    name = STAND_IN
    library = "The stand-in"
    rank = 2000
    needs_gpu = True
    package = "numpy"
    install = "Run it from a checkout."
    is_advised = False
    pace: ClassVar[Pace] = Pace()
    opened: ClassVar[list[StandInRunner]] = []

    def open(self, bundle: Bundle, options: LoadOptions) -> Runner:
        """No file is read."""
        runner = StandInRunner(bundle, self.pace)
        self.opened.append(runner)
        return runner

    def unavailable_reason(self, bundle: Bundle, options: LoadOptions) -> UnavailableReason | None:
        """None: it runs every bundle, but ``auto`` does not take it."""
        return None

    def is_built_into(self, bundle: Bundle) -> bool:
        """No bundle has anything for it."""
        return False


class StandInRunner:
    """See `hdruntime.backends.Runner`. A batch begins when it is started or when the one before ends, as on a GPU.

    Attributes:
        batches: that were run, in the order of their starts.
    """

    batch_tokens = _BATCH_TOKENS
    backend = STAND_IN
    precision = hdruntime.Precision.AUTO

    def __init__(self, bundle: Bundle, pace: Pace) -> None:
        self._manifest, self.max_len = bundle.manifest, bundle.manifest.max_len
        self._tokens_per_second, self.max_in_flight = pace
        self.batches: list[Batch] = []
        self._free_at = 0.0
        self._is_closed = False
        self._values: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()

    def max_padding(self, tokens: int) -> int:
        """Any number."""
        return sys.maxsize

    def max_rows(self, tokens: int) -> int:
        """Any number."""
        return sys.maxsize

    def computed_tokens(self, attention_mask: np.ndarray) -> int:
        """All."""
        return attention_mask.size

    def start(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Callable[[], dict[str, np.ndarray]]:
        """Begin to wait."""
        self._require_open()
        mask = inputs[self._manifest.mask]
        rows, longest = mask.shape
        took = 0.0 if self._tokens_per_second is None else mask.size / self._tokens_per_second
        with self._lock:
            began = max(self._free_at, time.perf_counter())
            self._free_at = ended = began + took
            self.batches.append(Batch(rows, longest, int(np.count_nonzero(mask)), began, ended))

        def results() -> dict[str, np.ndarray]:
            time.sleep(max(0.0, ended - time.perf_counter()))
            self._require_open()
            return {
                spec.name: self._answer(spec.name, [_size(axis, rows, longest) for axis in spec.shape])
                for spec in self._manifest.outputs
                if spec.name in outputs
            }

        return results

    def open_states(self, rows: int) -> Any:
        """There are none."""
        raise BackendError("The stand-in carries no states.")

    def close(self) -> None:
        """Later starts are refused."""
        self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise BackendError("The session is closed; load the bundle again.")

    def _answer(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """The first numbers of an array that is kept: to make it anew would cost what a GPU does not cost."""
        needed = math.prod(shape)
        with self._lock:
            kept = self._values.get(name)
            if kept is None or kept.size < needed:
                base = _sparse(shape[-1]) if name == "sparse_embedding" else _dense(needed)
                kept = self._values[name] = np.resize(base, max(needed, base.size))
        return kept[:needed].reshape(shape)


def busy_share(batches: Sequence[Batch], seconds: float) -> float:
    """Share of some seconds in which the stand-in computed."""
    return sum(batch.ended - batch.began for batch in batches) / seconds


def padding_share(batches: Sequence[Batch]) -> float:
    """Padding as a share of all computed tokens."""
    return 1 - sum(batch.tokens for batch in batches) / sum(batch.rows * batch.longest for batch in batches)


def _size(axis: str | int, rows: int, longest: int) -> int:
    return axis if isinstance(axis, int) else {"batch": rows, "tokens": longest}[axis]


def _dense(count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(min(count, 2**22), np.float32) / 20


def _sparse(width: int) -> np.ndarray:
    """Sparse vectors as rows of `width` weights; most weights are 0."""
    draw = np.random.default_rng(0)
    rows = np.zeros((_ROWS_WITHOUT_REPETITION, width), np.float32)
    for row in rows:
        row[draw.choice(width, min(_ACTIVE, width), replace=False)] = draw.random(min(_ACTIVE, width), np.float32) + 0.1
    return rows.ravel()
