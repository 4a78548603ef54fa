"""The memory of a model in a check: PyTorch's own memories, and how a graph's are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from hdexport.model.carried_states import MASK, carried_name, left_name
from hdexport.verify.grid import Case
from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import InputSpec, Manifest
from hdruntime.bundle.state_start import state_at_start

Outputs = Mapping[str, FloatArray]


class PastTexts:
    """The memories of the rows of a case.

    The first row remembers another text, the second the later half of one, and all others nothing. With padding on the
    left nothing is seen: padding would stand between the memory and the text.

    Args:
        manifest: of the bundle.
        leaves: tokens of a past text, and of the memory -> the memory that PyTorch leaves after it, with a batch axis.
    """

    def __init__(self, manifest: Manifest, leaves: Callable[[int, int], Outputs]) -> None:
        self._manifest, self._leaves = manifest, leaves
        self._found: dict[tuple[int, int], Outputs] = {}

    def of_row(self, case: Case, row: int) -> dict[str, FloatArray]:
        """Name of each memory -> [1, ...]."""
        carried, longest, size = self._manifest.memories, self._manifest.document_tokens, self._size(case)
        found = {spec.name: state_at_start(spec, rows=1, memory=size) for spec in carried}
        mask = carried_name(MASK)
        if case.padding == "left":
            if mask in found:
                found[mask] *= 0
            return found
        past = max(size, 1) if longest is None else min(size, longest - case.tokens)
        if row > 1 or past < 1:
            return found
        if (past, size) not in self._found:
            self._found[past, size] = self._leaves(past, size)
        left = self._found[past, size]
        found = {spec.name: left[str(spec.fed_from)] for spec in carried}
        if row == 1 and mask in found:
            found[mask] = np.where(np.arange(size) < size // 2, 0, found[mask]).astype(np.float32)
        return found

    def of_case(self, case: Case) -> dict[str, FloatArray]:
        """Name of each memory -> [batch, ...]."""
        rows = [self.of_row(case, row) for row in range(case.batch)]
        return {spec.name: np.concatenate([row[spec.name] for row in rows]) for spec in self._manifest.memories}

    def _size(self, case: Case) -> int:
        """Tokens of the axis ``memory`` in a case: the most, the least, or half of them, by the case's tokens."""
        least, most = self._manifest.least_memory, self._manifest.most_memory
        return (most, max(least, most // 2 + 1), least)[case.tokens % 3] if most else 0


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
