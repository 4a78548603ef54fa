"""A bundle's model in PyTorch instead of its graph, in bfloat16: for processors with AMX, several times as fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hdexport.verify.pytorch_reference import Reference
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend


class PyTorchRunner:
    """The reference of `hdexport verify`, as a `hdruntime.backends.Runner`.

    Args:
        reference: the model.
        max_len: most tokens of a row.
    """

    backend = Backend.ONNXRUNTIME
    precision = Precision.BFLOAT16
    batch_tokens = 4096
    max_in_flight = 1

    def __init__(self, reference: Reference, *, max_len: int) -> None:
        self._reference, self.max_len = reference, max_len

    def max_padding(self, tokens: int) -> int:
        """None: rows of a batch have equal lengths."""
        return 0

    def max_rows(self, tokens: int) -> int:
        """No limit."""
        return sys.maxsize

    def computed_tokens(self, attention_mask: npt.NDArray[np.int64]) -> int:
        """All tokens, padding included."""
        return attention_mask.size

    def start(
        self, inputs: Mapping[str, npt.NDArray[Any]], outputs: Sequence[str]
    ) -> Callable[[], dict[str, npt.NDArray[np.float32]]]:
        """Compute a batch at once."""
        with torch.autocast("cpu", torch.bfloat16):
            found = self._reference.batch(inputs)
        return lambda: {name: found[name].astype(np.float32) for name in outputs}

    def close(self) -> None:
        """Nothing is held."""
