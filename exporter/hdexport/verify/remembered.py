"""The memory of a model in a check: PyTorch's own memories, and how a graph's are compared."""

from __future__ import annotations

__all__ = ["PastTexts", "empty_memory", "memory_tokens", "there"]

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hdexport.model.memories import MASK, left_name, memory_name
from hdexport.verify.grid import Case
from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Fill, InputSpec

Outputs = Mapping[str, FloatArray]


def empty_memory(spec: InputSpec, rows: int, tokens: int) -> FloatArray:
    """A memory before the first call: of the spec's shape, its axis ``memory`` of that many tokens."""
    sizes = {"batch": rows, "memory": tokens}
    shape = [axis if isinstance(axis, int) else sizes[axis] for axis in spec.shape]
    return np.full(shape, float(spec.default.fill is Fill.ONES), np.float32)


def memory_tokens(case: Case, *, least: int, most: int) -> int:
    """Tokens of the axis ``memory`` in a case: the most, the least, or half of them, by the case's tokens."""
    return (most, max(least, most // 2 + 1), least)[case.tokens % 3] if most else 0


class PastTexts:
    """The memories of the rows of a case.

    The first row remembers another text, the second the later half of one, and all others nothing. With padding on the
    left nothing is seen: padding would stand between the memory and the text.

    Args:
        specs: the memories of the bundle.
        leaves: tokens of a past text, and of the memory -> the memory that PyTorch leaves after it, with a batch axis.
        longest: tokens that a past text and the case's may have in all; None for any number.
    """

    def __init__(
        self, specs: Sequence[InputSpec], leaves: Callable[[int, int], Outputs], *, longest: int | None = None
    ) -> None:
        self.specs = tuple(specs)
        self._leaves, self._longest = leaves, longest
        self._found: dict[tuple[int, int], Outputs] = {}
        self._least_most = _sizes(self.specs)

    def of_row(self, case: Case, row: int) -> dict[str, FloatArray]:
        """Name of each memory -> [1, ...]."""
        least, most = self._least_most
        size = memory_tokens(case, least=least, most=most)
        found = {spec.name: empty_memory(spec, 1, size) for spec in self.specs}
        mask = memory_name(MASK)
        if case.padding == "left":
            if mask in found:
                found[mask] *= 0
            return found
        past = max(size, 1) if self._longest is None else min(size, self._longest - case.tokens)
        if row > 1 or past < 1:
            return found
        if (past, size) not in self._found:
            self._found[past, size] = self._leaves(past, size)
        left = self._found[past, size]
        found = {spec.name: left[str(spec.fed_from)] for spec in self.specs}
        if row == 1 and mask in found:
            found[mask] = np.where(np.arange(size) < size // 2, 0, found[mask]).astype(np.float32)
        return found

    def of_case(self, case: Case) -> dict[str, FloatArray]:
        """Name of each memory -> [batch, ...]."""
        rows = [self.of_row(case, row) for row in range(case.batch)]
        return {spec.name: np.concatenate([row[spec.name] for row in rows]) for spec in self.specs}


def _sizes(specs: Sequence[InputSpec]) -> tuple[int, int]:
    """The least and the most tokens of the axis ``memory``; as `hdruntime.bundle.manifest.Manifest` has them."""
    of_tokens = [spec for spec in specs if spec.has_memory_axis]
    most = max((spec.bound or 0 for spec in of_tokens), default=0)
    is_seen = any(spec.default.fill is Fill.ONES for spec in of_tokens)
    return most if is_seen else min(1, most), most


def there(spec: InputSpec, expected: Outputs) -> npt.NDArray[np.bool_] | slice:
    """The part of a memory's first axis that is compared: the tokens that are there, or all of it.

    Args:
        spec: of the memory.
        expected: all that is left in one row, without the batch axis.
    """
    mask = left_name(MASK)
    if not spec.has_memory_axis or spec.fed_from == mask or mask not in expected:
        return slice(None)
    there: npt.NDArray[np.bool_] = expected[mask] == 1
    return there
