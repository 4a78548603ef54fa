"""What the way of batches to a GPU asks of a backend."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from hdruntime.bundle.manifest import Role, TensorSpec
from hdruntime.gpu.layout import Layout, ShapeChoice
from hdruntime.gpu.slots import Slot

Tensors = Mapping[str, tuple[TensorSpec, np.dtype]]
"""Name of an input or output -> its axes, and its type on the GPU."""


class DeviceModel(Protocol):
    """A backend's model on a GPU. It computes batches one after another on one stream; the GPU's context is current in
    every call, and one thread calls at a time.

    Attributes:
        inputs: inputs in the order of `staged_order`.
        outputs: float32.
        zeroed: outputs with an axis of tokens in which the model sets padding to 0 itself.
    """

    inputs: Tensors
    outputs: Tensors
    zeroed: Collection[str]

    def choose(self, batch: int, tokens: int, *, memory: int = 0) -> ShapeChoice:
        """The shape to pad a batch to; one that does not fit is an InputError."""

    def layouts(self, choice: ShapeChoice, outputs: Sequence[str]) -> tuple[Layout, Layout]:
        """Where the inputs, and the outputs, of a batch lie in a slot; a model that computes no others has those
        outputs alone."""

    def compute(
        self, slot: Slot, choice: ShapeChoice, inputs: Layout, outputs: Mapping[str, int]
    ) -> Callable[[], object] | None:
        """Start a batch, whose inputs the computing stream may read in the slot.

        Returns what to call when the batch is computed and the slot has no other yet, if anything.

        Args:
            inputs: their layout in the slot.
            outputs: name -> address on the GPU, of all outputs of the batch's layout and others that were asked for.

        Raises:
            BackendError: the backend or the driver reports an error; some of the work may be enqueued.
            OutOfMemoryError: the GPU has too little memory; likewise.
        """

    def release(self) -> None:
        """Free what only speeds up the next batch; nothing is enqueued."""

    def close(self) -> None:
        """Free everything; nothing is enqueued."""


def staged_order(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Inputs with the recurrent states last, so that those before them are one copy to the GPU."""
    return sorted(specs, key=lambda spec: getattr(spec, "role", None) is Role.RECURRENT_STATE)
