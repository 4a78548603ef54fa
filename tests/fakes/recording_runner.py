"""A backend that answers at once, records its batches, and fails as a test requests."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import BackendError, OutOfMemoryError

BROKEN_ID = 10
"""A batch with this id fails."""

NAN_ID = 9
"""The row's output at this id is NaN."""


def answer(input_ids: np.ndarray, hidden_size: int = 4) -> np.ndarray:
    """The backend's answer: float32 [..., hidden_size], each id and its position in the text, alternating."""
    positions = np.broadcast_to(np.arange(input_ids.shape[-1]), input_ids.shape)
    values = np.stack([input_ids, positions] * (hidden_size // 2), axis=-1).astype(np.float32)
    values[input_ids == NAN_ID] = np.nan
    return values


@dataclass(eq=False, kw_only=True)
class RecordingRunner:
    """A `Runner` for bundles of feature extraction.

    Attributes:
        memory: tokens, including padding, of all batches in flight; a batch beyond it runs out of memory.
        fails_late: lack of memory is raised when results are requested, rather than at the start.
        max_rows: tokens -> most rows.
        shapes: of every started batch.
        failures: number of batches that ran out of memory.
        in_flight: numbers of the batches in flight.
        most_seen: most batches in flight at a time.
        order: numbers of the batches in the order of requests for their results.
    """

    backend = Backend.ONNXRUNTIME
    precision = Precision.FLOAT32

    memory: int = sys.maxsize
    fails_late: bool = False
    max_in_flight: int = 1
    batch_tokens: int = 64
    max_len: int = 16
    max_padding: Callable[[int], int] = lambda tokens: sys.maxsize
    max_rows: Callable[[int], int] = lambda tokens: sys.maxsize
    shapes: list[tuple[int, int]] = field(default_factory=list)
    failures: int = 0
    in_flight: list[int] = field(default_factory=list)
    most_seen: int = 0
    order: list[int] = field(default_factory=list)
    is_closed: bool = False

    def computed_tokens(self, attention_mask: np.ndarray) -> int:
        """See `hdruntime.backends.Runner`."""
        return attention_mask.size

    def start(self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str]) -> Callable[[], dict[str, np.ndarray]]:
        """See `hdruntime.backends.Runner`."""
        self._require_open()
        input_ids = inputs["input_ids"]
        number, needed = len(self.shapes), input_ids.size
        self.shapes.append(input_ids.shape)
        if not self.fails_late:
            self._require_memory(needed)
        self.in_flight.append(number)
        self.most_seen = max(self.most_seen, len(self.in_flight))

        def results() -> dict[str, np.ndarray]:
            self.in_flight.remove(number)
            self.order.append(number)
            self._require_open()
            if self.fails_late:
                self._require_memory(needed)
            if (input_ids == BROKEN_ID).any():
                raise BackendError("the model does not like this id")
            return {"last_hidden_state": answer(input_ids) * inputs["attention_mask"][..., np.newaxis]}

        return results

    def close(self) -> None:
        """See `hdruntime.backends.Runner`."""
        self.is_closed = True

    def _require_open(self) -> None:
        if self.is_closed:
            raise BackendError("closed")

    def _require_memory(self, needed: int) -> None:
        if needed + sum(math.prod(self.shapes[other]) for other in self.in_flight) > self.memory:
            self.failures += 1
            raise OutOfMemoryError("no memory")
