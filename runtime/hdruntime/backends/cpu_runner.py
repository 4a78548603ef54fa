"""Batches on a CPU, where padding costs time: rows with padding on the right run without it, or with little."""

from __future__ import annotations

import abc
import ctypes
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hdruntime.arrays import AnyArray, Inputs, IntArray, Outputs
from hdruntime.backends.bundle_runner import BundleRunner, HostStates
from hdruntime.packing import pack_by_tokens

_Group = tuple[npt.NDArray[np.intp], int | None]
"""Indices of rows, and their length; None for rows that run with their mask."""


class CpuRunner(BundleRunner):
    """Runs rows with padding on the right in groups of similar lengths, with at most `max_padding` tokens of padding,
    and rows with other masks with their mask. Where padding changes outputs, batches run as given."""

    def max_padding(self, tokens: int) -> int:
        """None; see :class:`hdruntime.backends.Runner`."""
        return 0

    def computed_tokens(self, attention_mask: IntArray) -> int:
        """Without the padding that is removed; see :class:`hdruntime.backends.Runner`."""
        if attention_mask.all():
            return attention_mask.size
        return sum(len(rows) * (length or attention_mask.shape[1]) for rows, length in self._groups(attention_mask))

    def run(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
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
                values[attention_mask[rows, : values.shape[1]] == 0] = 0
                shape = (batch, tokens, *values.shape[2:])
                whole.setdefault(name, np.zeros(shape, values.dtype))[rows, :length] = values
        return whole

    def open_states(self, rows: int) -> HostStates:
        """Arrays in the memory of the CPU; see :class:`hdruntime.backends.Runner`."""
        return HostStates(self, rows)

    def run_bound(
        self, inputs: Inputs, outputs: Sequence[str], states: Mapping[str, Any], next_states: Mapping[str, Any]
    ) -> Outputs:
        """Run a batch as given, on recurrent states that are arrays."""
        results = self._run_as_given({**inputs, **states}, list(dict.fromkeys((*outputs, *next_states))))
        for name, array in next_states.items():
            array[...] = results[name]
        return {name: results[name] for name in outputs}

    def _part(self, name: str, array: AnyArray, rows: npt.NDArray[np.intp], length: int | None) -> AnyArray:
        return np.ascontiguousarray(array[rows, :length] if self._has_tokens_axis[name] else array[rows])

    def _groups(self, attention_mask: IntArray) -> Iterable[_Group]:
        """Rows that run together, and how many of their tokens do; None for all."""
        if self.manifest.padding is not None:
            return [(np.arange(len(attention_mask)), None)]
        return similar_length_groups(attention_mask, self.max_padding)

    @abc.abstractmethod
    def _run_as_given(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        """Run a batch with its mask."""


def similar_length_groups(attention_mask: IntArray, max_padding: Callable[[int], int]) -> Iterator[_Group]:
    """Group the rows of a batch with padding only on the right by their length.

    Yields the indices of a group's rows and the length of its longest row; finally, if there are any, the rows with
    another mask (padding on the left, holes, only padding) and None. `max_padding` maps the length of a group's longest
    row to the maximum tokens of padding in the group.
    """
    right_padded = right_padded_rows(attention_mask)
    rows = np.flatnonzero(right_padded)
    lengths = attention_mask.sum(axis=1)[rows]
    for group in pack_by_tokens(lengths.tolist(), batch_tokens=sys.maxsize, max_padding=max_padding):
        yield np.sort(rows[group]), int(lengths[group[0]])
    if not right_padded.all():
        yield np.flatnonzero(~right_padded), None


def right_padded_rows(attention_mask: IntArray) -> npt.NDArray[np.bool_]:
    """[batch]: which rows begin with at least one real token and have all their padding after the real tokens."""
    # The mask never rises along such a row, and starts with a one.
    return (np.diff(attention_mask, axis=1) <= 0).all(axis=1) & (attention_mask[:, 0] == 1)


def give_memory_back() -> None:
    """Let the C library return free memory of its heaps; glibc otherwise keeps up to 64 MB in each."""
    if sys.platform == "linux":
        # musl has no such function, and keeps nothing.
        getattr(_c_library(), "malloc_trim", bool)(0)


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
