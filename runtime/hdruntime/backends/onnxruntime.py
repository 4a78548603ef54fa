"""ONNX Runtime on the CPU."""

from __future__ import annotations

__all__ = ["OnnxRuntimeRunner", "equal_length_groups", "right_padded_rows"]

import ctypes
import functools
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hdruntime.backends.onnxruntime_memories import HostMemories
from hdruntime.backends.onnxruntime_sessions import (
    GraphRunner,
    Inputs,
    Outputs,
    chosen_graph,
    open_session,
    session_options,
)
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import CPU_LOWERING, PORTABLE_LOWERING

logger = logging.getLogger(__name__)

_SLOW_FUSIONS = ["BiasGeluFusion", "SkipLayerNormFusion"]
"""Fused kernels that lose to the plain ones on long inputs, which work in place: the sample model at 4096 tokens on two
AMD EPYC cores took 690 ms and grew by 164 MB with both fusions, 660 ms and 136 MB without (ONNX Runtime 1.31.1)."""

_USES_ARENA = False
"""ONNX Runtime's arena keeps the memory of its largest batch as long as the session lives. The sample model on two
shared cores of an AMD EPYC (ONNX Runtime 1.31.1, 2026-11-22): a session of 109 MB grew to 911 MB after a batch of
64 x 512 tokens and 100 calls of 16; without an arena it stays at 109 MB. A call then takes 1.05 times the CPU time at
16 tokens, 1.00 at 128 and 512, 1.02 at 1024 (medians of four rounds, 0.91 to 1.20), and the peak of a batch of 4096
tokens is 152 MB above the session instead of 103, because the C library leaves gaps. Shrinking the arena after the
large batch left 1.85 times the memory from before it."""

_LARGE_RUN_TOKENS = 4096
"""After a run of more tokens the C library returns free memory to the system: 12 x 512 tokens leave twice the memory
otherwise. It took 1.00 to 1.02 times the CPU time of that batch."""

_Group = tuple[npt.NDArray[np.intp], int | None]
"""Indices of rows, and their length; None for rows that run with their mask."""


class OnnxRuntimeRunner(GraphRunner):
    """A bundle's graph in an ONNX Runtime session on the CPU, also where the package has GPU providers.

    The fast attention of ONNX Runtime on the CPU, whose memory is linear in tokens, takes no mask. So rows
    with padding on the right run without padding, grouped by length; only rows with other masks run with their mask.
    Where padding changes answers, batches run as given.

    Args:
        bundle: the runner takes its graph for the CPU, else its portable graph.
        threads: threads of one run; None for ONNX Runtime's choice.
        spinning: whether waiting threads keep their cores busy: faster, unless others need the cores.

    Raises:
        BackendError: ONNX Runtime cannot load the graph.
        BundleCorruptError: the bundle has no graph, or one that differs from its manifest.
    """

    backend = Backend.ONNXRUNTIME
    prefers_equal_lengths = True
    batch_tokens = 4096
    """Two cores, all-MiniLM-L6-v2: 16384 tokens gained nothing and took 791 MB instead of 376."""

    def __init__(self, bundle: Bundle, *, threads: int | None = None, spinning: bool = True) -> None:
        graph = chosen_graph(bundle, (CPU_LOWERING, PORTABLE_LOWERING), where="the CPU")
        options = session_options(threads, spinning=spinning)
        options.enable_cpu_mem_arena = _USES_ARENA
        session = open_session(
            bundle, graph, options, providers=[("CPUExecutionProvider", {})], disabled_optimizers=_SLOW_FUSIONS
        )
        super().__init__(bundle, session)
        self._keeps_padding = bundle.manifest.padding is not None
        logger.info("onnxruntime runs %s on the CPU", graph.file)

    def computed_tokens(self, attention_mask: npt.NDArray[np.int64]) -> int:
        """Only the real tokens of rows that run without padding; see :class:`hdruntime.backends.Runner`."""
        if self._keeps_padding or attention_mask.all():
            return attention_mask.size
        whole = ~right_padded_rows(attention_mask)
        return int(attention_mask[~whole].sum()) + attention_mask[whole].size

    def open_memories(self, rows: int) -> HostMemories:
        """Arrays in the memory of the CPU; see :class:`hdruntime.backends.Runner`."""
        return HostMemories(self, rows)

    def run(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        """Run a batch; see :class:`hdruntime.backends.Runner`."""
        attention_mask = inputs[self.mask]
        if attention_mask.all():
            return self._run_as_given(inputs, outputs)
        batch, tokens = attention_mask.shape
        whole: Outputs = {}
        for rows, length in self._groups(attention_mask):
            part = self._run_as_given(
                {name: self._part(name, array, rows, length) for name, array in inputs.items()}, outputs
            )
            for name, values in part.items():
                if not self._has_tokens_axis[name]:
                    shape = (batch, *values.shape[1:])
                    whole.setdefault(name, np.empty(shape, values.dtype))[rows] = values
                    continue
                if length is None:
                    values[attention_mask[rows] == 0] = 0
                shape = (batch, tokens, *values.shape[2:])
                whole.setdefault(name, np.zeros(shape, values.dtype))[rows, :length] = values
        return whole

    def _part(
        self, name: str, array: npt.NDArray[Any], rows: npt.NDArray[np.intp], length: int | None
    ) -> npt.NDArray[Any]:
        return np.ascontiguousarray(array[rows, :length] if self._has_tokens_axis[name] else array[rows])

    def _groups(self, attention_mask: npt.NDArray[np.int64]) -> Iterable[_Group]:
        """Rows that run together, and how many of their tokens do; None for all."""
        return [(np.arange(len(attention_mask)), None)] if self._keeps_padding else equal_length_groups(attention_mask)

    def _run_as_given(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        with self._open_session(inputs) as session:
            arrays: list[npt.NDArray[np.float32]] = session.run(outputs, dict(inputs))
        self._give_memory_back(inputs)
        return dict(zip(outputs, arrays, strict=True))

    def _bound(self, session: Any, inputs: Inputs, *others: Any) -> Outputs:
        results = super()._bound(session, inputs, *others)
        self._give_memory_back(inputs)
        return results

    def _give_memory_back(self, inputs: Inputs) -> None:
        if inputs[self._ids].size > _LARGE_RUN_TOKENS:
            _give_memory_back()


def equal_length_groups(attention_mask: npt.NDArray[np.int64]) -> Iterator[_Group]:
    """Group the rows of a batch with padding only on the right by their length.

    Args:
        attention_mask: int64 [batch, tokens], 1 for real tokens, 0 for padding.

    Yields:
        the indices of a group's rows, ascending, and their length; finally, if there are any, the rows with
        another mask (padding on the left, holes, only padding) and None.
    """
    lengths = attention_mask.sum(axis=1)
    right_padded = right_padded_rows(attention_mask)
    for length in np.unique(lengths[right_padded]):
        yield np.flatnonzero(right_padded & (lengths == length)), int(length)
    if not right_padded.all():
        yield np.flatnonzero(~right_padded), None


def right_padded_rows(attention_mask: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """[batch]: which rows begin with at least one real token and have all their padding after the real tokens."""
    # The mask never rises along such a row, and starts with a one.
    return (np.diff(attention_mask, axis=1) <= 0).all(axis=1) & (attention_mask[:, 0] == 1)


def _give_memory_back() -> None:
    """Let the C library return free memory of its heaps; glibc otherwise keeps up to 64 MB in each."""
    if sys.platform == "linux":
        # musl has no such function, and keeps nothing.
        getattr(_c_library(), "malloc_trim", bool)(0)


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
