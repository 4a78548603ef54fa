"""Which shapes are worth a CUDA graph: bookkeeping without a GPU."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Hashable
from enum import StrEnum

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

_ENQUEUE_BOUND = 1.5
"""A step is enqueue-bound if its time on the GPU is less than this multiple of the CPU's time to enqueue it.

The GPU runs while the CPU enqueues, so an idle GPU never finishes much earlier than the CPU. If both times are about
equal, the GPU waits for launches, and a graph, which is one launch, saves that time. If the GPU takes much longer, it
always has work queued, and a graph saves nothing.
"""

_MOST_SHAPES = 4096
"""Maximum number of shapes; with steps of a sixteenth an engine has a few hundred lengths, times its batch sizes."""

_SAME = 2**-6
"""Two runs of one shape and input differ at most by the order of additions: a few roundings of bfloat16 (2^-8 each) of
the largest value. A failed replay leaves the previous content, which is NaN."""


class GraphMode(StrEnum):
    """When to use CUDA graphs: ``auto`` for enqueue-bound steps, ``on`` for every shape, ``off`` never."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class GraphPolicy:
    """Decides from the times of earlier runs. Safe to use from several threads.

    The first run of a shape loads kernels and does not count. The second decides, and from the third on the shape may
    have a graph; with ``on`` from the second.
    """

    def __init__(self, mode: GraphMode) -> None:
        self._mode = mode
        self._runs: OrderedDict[Hashable, int] = OrderedDict()
        self._wanted: dict[Hashable, bool] = {}
        self._lock = threading.Lock()

    def wants(self, shape: Hashable) -> bool:
        """Whether to capture the next batch of this shape."""
        with self._lock:
            if self._mode is GraphMode.ON:
                return shape in self._runs and self._wanted.get(shape, True)
            return self._mode is GraphMode.AUTO and self._wanted.get(shape, False)

    def ran(self, shape: Hashable, *, enqueue_ms: float, gpu_ms: float) -> None:
        """Record a run without a graph: the CPU's time to enqueue it and the GPU's time to run it."""
        with self._lock:
            runs = self._runs[shape] = self._runs.pop(shape, 0) + 1
            if runs == 2 and self._mode is GraphMode.AUTO:
                self._wanted.setdefault(shape, gpu_ms < _ENQUEUE_BOUND * enqueue_ms)
            if len(self._runs) > _MOST_SHAPES:
                forgotten, _ = self._runs.popitem(last=False)
                self._wanted.pop(forgotten, None)

    def reject(self, shape: Hashable) -> None:
        """Never capture that shape."""
        with self._lock:
            self._wanted[shape] = False

    def switch_off(self, reason: str) -> None:
        """Never capture anything again; the reason is logged as a warning."""
        self._mode = GraphMode.OFF
        logger.warning("CUDA graphs are off from here on: %s", reason)


def same_answers(first: npt.NDArray[np.floating], second: npt.NDArray[np.floating]) -> bool:
    """Whether the outputs of two runs of one batch agree up to rounding; NaN and infinity must be at the same
    positions."""
    largest = float(np.abs(first[np.isfinite(first)]).max(initial=0.0))
    return np.allclose(first, second, rtol=0, atol=_SAME * largest, equal_nan=True)
