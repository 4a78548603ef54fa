"""Which shapes are worth a CUDA graph, and which graphs are kept: bookkeeping without a GPU."""

from __future__ import annotations

__all__ = ["GraphMode", "GraphPolicy", "LruCache", "same_answers"]

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

_ENQUEUE_BOUND = 1.5
"""A step is enqueue-bound where the GPU takes less than so many times as long as the CPU needs to enqueue it.

The GPU runs while the CPU enqueues, so that on an idle GPU its time is never much less than the CPU's. Where both are
about equal, it waits for launches, and a graph, which is one launch, saves that. Where it takes much longer it has
always work queued, and a graph saves nothing.
"""

_MOST_SHAPES = 4096
"""Shapes that are remembered; with steps of a sixteenth an engine has a few hundred lengths, times its batch sizes."""

_SAME = 2**-6
"""Two runs of one shape and input differ by the order of additions at most: a few roundings of bfloat16 (2^-8 each) of
the largest value. A replay that went wrong leaves what was there before, which is NaN."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class GraphMode(str, Enum):
    """When CUDA graphs are used: ``auto`` where a step is enqueue-bound, ``on`` for every shape, ``off`` never."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class GraphPolicy:
    """Decides by what it was told of earlier runs. Safe to use from several threads.

    The first run of a shape loads kernels and is not judged. The second tells, and from the third on there may be a
    graph; with ``on`` from the second.
    """

    def __init__(self, mode: GraphMode) -> None:
        self._mode = mode
        self._runs: OrderedDict[Hashable, int] = OrderedDict()
        self._wanted: dict[Hashable, bool] = {}
        self._lock = threading.Lock()

    @property
    def off(self) -> bool:
        """Whether no shape gets a graph any more."""
        return self._mode is GraphMode.OFF

    def wants(self, shape: Hashable) -> bool:
        """Whether the next batch of that shape shall be captured."""
        with self._lock:
            if self._mode is GraphMode.ON:
                return shape in self._runs and self._wanted.get(shape, True)
            return self._mode is GraphMode.AUTO and self._wanted.get(shape, False)

    def ran(self, shape: Hashable, *, enqueue_ms: float, gpu_ms: float) -> None:
        """Note a run without a graph: what the CPU took to enqueue it, and the GPU to run it."""
        with self._lock:
            runs = self._runs[shape] = self._runs.pop(shape, 0) + 1
            if runs == 2 and self._mode is GraphMode.AUTO:
                self._wanted.setdefault(shape, gpu_ms < _ENQUEUE_BOUND * enqueue_ms)
            if len(self._runs) > _MOST_SHAPES:
                forgotten, _ = self._runs.popitem(last=False)
                self._wanted.pop(forgotten, None)

    def refuse(self, shape: Hashable) -> None:
        """Never capture that shape."""
        with self._lock:
            self._wanted[shape] = False

    def switch_off(self, reason: str) -> None:
        """Never capture anything again; the reason is logged as a warning."""
        self._mode = GraphMode.OFF
        logger.warning("CUDA graphs are off from here on: %s", reason)


class LruCache(Generic[Key, Value]):
    """At most so many values; the one that was not used for longest goes first.

    Args:
        most: values that are kept.
        close: called with a value that goes.
    """

    def __init__(self, most: int, close: Callable[[Value], None]) -> None:
        self._most, self._close = most, close
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """The value, which is then the last to go; None where there is none."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: Key, value: Value) -> None:
        """Keep a value in place of the key's old one."""
        self.remove(key)
        self._values[key] = value
        while len(self._values) > self._most:
            self.remove(next(iter(self._values)))

    def remove(self, key: Key) -> None:
        """Let go of a value, if there is one."""
        if key in self._values:
            self._close(self._values.pop(key))

    def clear(self) -> None:
        """Let go of all values."""
        for key in list(self._values):
            self.remove(key)


def same_answers(first: npt.NDArray[np.floating], second: npt.NDArray[np.floating]) -> bool:
    """Whether two runs of one batch agree, rounding aside; NaN and infinity must be at the same places.

    Args:
        first: outputs of one run.
        second: of the other, of the same shape.
    """
    finite = np.isfinite(first)
    if not np.array_equal(finite, np.isfinite(second)):
        return False
    if not np.array_equal(first[~finite], second[~finite], equal_nan=True):
        return False
    largest = float(np.abs(first[finite]).max(initial=0.0))
    return bool((np.abs(first[finite] - second[finite]) <= _SAME * largest).all())
