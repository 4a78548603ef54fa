"""Batches on their way: padded into staging memory, copied to the GPU, computed, and copied back."""

from __future__ import annotations

__all__ = ["Batches"]

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hdruntime.backends.tensorrt.device_inputs import DeviceInput, copy_to_device
from hdruntime.backends.tensorrt.engine import LoadedEngine
from hdruntime.backends.tensorrt.graph_policy import GraphPolicy
from hdruntime.backends.tensorrt.layout import Layout, layout_of, padding_ranges
from hdruntime.backends.tensorrt.machine import Machine
from hdruntime.backends.tensorrt.shapes import Choice
from hdruntime.backends.tensorrt.slots import FloatArrays, Slot
from hdruntime.gpu.cuda import Device
from hdruntime.gpu.device_arrays import DeviceArray


class Batches:
    """Starts batches of one engine, and collects their results.

    Args:
        device: the GPU; its context is current in :meth:`start` and :meth:`start_on_device`.
        loaded: the engine.
        machine: what computes.
        policy: is told what batches took.
        mask: name of the input that tells real tokens from padding.
        fill: name of an input -> what it is padded with; others are with 0.
    """

    def __init__(
        self,
        device: Device,
        loaded: LoadedEngine,
        machine: Machine,
        policy: GraphPolicy,
        *,
        mask: str,
        fill: Mapping[str, int],
    ) -> None:
        self._device, self._loaded, self._machine, self._policy = device, loaded, machine, policy
        self._mask, self._fill = mask, fill

    def start(
        self,
        slot: Slot,
        choice: Choice,
        inputs: Mapping[str, npt.NDArray[Any]],
        outputs: list[str],
    ) -> Callable[[], FloatArrays]:
        """Begin a batch.

        Args:
            slot: free.
            choice: profile and shape that the batch is padded to.
            inputs: of the types and shapes of the manifest.
            outputs: names of the outputs wanted.

        Returns:
            what waits for the results and copies them out of the slot.

        Raises:
            BackendError: TensorRT or the driver refuses; some of the work may be under way.
            OutOfMemoryError: memory was short; likewise.
        """
        layouts = self._layouts(choice)
        slot.ensure(*layouts)
        self._stage(slot, layouts[0], inputs)
        call = self._device.call
        call(
            "cuMemcpyHtoDAsync",
            slot.inputs.address,
            slot.staged_inputs.address,
            layouts[0].size,
            self._machine.copying_in,
        )
        call("cuEventRecord", slot.copied_in, self._machine.copying_in)
        call("cuStreamWaitEvent", self._machine.computing, slot.copied_in, 0)
        enqueue_ms = self._machine.compute(slot, choice, slot.outputs.addresses(layouts[1]))
        call("cuStreamWaitEvent", self._machine.copying_out, slot.computed, 0)
        for name in outputs:
            place = layouts[1].places[name]
            staged, computed = slot.staged_outputs.address + place.offset, slot.outputs.address + place.offset
            call("cuMemcpyDtoHAsync", staged, computed, place.size, self._machine.copying_out)
        call("cuEventRecord", slot.copied_out, self._machine.copying_out)
        padding = inputs[self._mask] == 0
        return lambda: self._collected(slot, choice, layouts[1], outputs, padding, enqueue_ms)

    def start_on_device(
        self, slot: Slot, choice: Choice, inputs: Mapping[str, DeviceInput], outputs: list[str]
    ) -> tuple[dict[str, DeviceArray], Callable[[], FloatArrays]]:
        """Begin a batch that is on the GPU, and have read its inputs.

        Args:
            slot: free.
            choice: profile and shape that the batch is padded to.
            inputs: arrays that the copying stream may read.
            outputs: names of the outputs wanted.

        Returns:
            the results, and what waits until the slot is free again, which gives nothing.

        Raises:
            as :meth:`start`.
        """
        layouts = self._layouts(choice)
        slot.ensure(*layouts)
        mask = self._copied_in(slot, layouts[0], inputs)
        results = {}
        for name in outputs:
            padded = layouts[1].places[name].shape
            axes = mask.shape if self._has_tokens_axis(name) else mask.shape[:1]
            results[name] = DeviceArray(self._device, (*axes, *padded[len(axes) :]), padded=padded)
        addresses = {name: result.address for name, result in results.items()}
        enqueue_ms = self._machine.compute(slot, choice, slot.outputs.addresses(layouts[1]) | addresses)
        for name, result in results.items():
            if self._has_tokens_axis(name):
                self._zero_padding(result, layouts[1], name, mask)
            result.mark_ready(self._machine.computing)
        return results, lambda: self._computed(slot, choice, enqueue_ms)

    def _computed(self, slot: Slot, choice: Choice, enqueue_ms: float | None) -> FloatArrays:
        """Wait until a batch is computed, and note what it took."""
        with self._device.current():
            self._device.call("cuEventSynchronize", slot.computed)
            if enqueue_ms is not None:
                self._policy.ran(choice, enqueue_ms=enqueue_ms, gpu_ms=slot.gpu_ms())
        return {}

    def _collected(
        self,
        slot: Slot,
        choice: Choice,
        layout: Layout,
        outputs: list[str],
        padding: npt.NDArray[np.bool_],
        enqueue_ms: float | None,
    ) -> FloatArrays:
        """Wait for a batch and copy its results out of the staging memory."""
        with self._device.current():
            self._device.call("cuEventSynchronize", slot.copied_out)
        self._computed(slot, choice, enqueue_ms)
        rows, tokens = padding.shape
        staged = slot.staged_outputs.arrays(layout)
        results = {}
        for name in outputs:
            if self._has_tokens_axis(name):
                results[name] = staged[name][:rows, :tokens].copy()
                results[name][padding] = 0
            else:
                results[name] = staged[name][:rows].copy()
        return results

    def _copied_in(self, slot: Slot, layout: Layout, inputs: Mapping[str, DeviceInput]) -> npt.NDArray[np.int64]:
        """Copy inputs into the slot, wait until that is done, and tell the mask."""
        call, stream = self._device.call, self._machine.copying_in
        self._stage(slot, layout, {})
        call("cuMemcpyHtoDAsync", slot.inputs.address, slot.staged_inputs.address, layout.size, stream)
        for name, place in layout.places.items():
            copy_to_device(self._device, inputs[name], slot.inputs.address + place.offset, place, stream)
        # Where the mask is 0, results will be: it is the one input that is looked at.
        place = layout.places[self._mask]
        staged = slot.staged_inputs.address + place.offset
        call("cuMemcpyDtoHAsync", staged, slot.inputs.address + place.offset, place.size, stream)
        call("cuEventRecord", slot.copied_in, stream)
        call("cuEventSynchronize", slot.copied_in)
        rows, tokens = inputs[self._mask].shape
        return slot.staged_inputs.arrays(layout)[self._mask][:rows, :tokens].astype(np.int64)

    def _zero_padding(self, result: DeviceArray, layout: Layout, name: str, mask: npt.NDArray[np.int64]) -> None:
        place = layout.places[name]
        tokens = place.shape[1]
        size = place.size // (place.shape[0] * tokens)
        for row, values in enumerate(mask):
            for first, end in padding_ranges(values[np.newaxis]):
                address = result.address + (row * tokens + first) * size
                self._device.call("cuMemsetD8Async", address, 0, (end - first) * size, self._machine.computing)

    def _stage(self, slot: Slot, layout: Layout, inputs: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write inputs, padded to the shape of the layout, to the slot's staging memory."""
        for name, staged in slot.staged_inputs.arrays(layout).items():
            staged.fill(self._fill.get(name, 0))
            if name in inputs:
                # Smaller in rows, and where there are any in tokens.
                staged[tuple(slice(size) for size in inputs[name].shape)] = inputs[name]

    def _layouts(self, choice: Choice) -> tuple[Layout, Layout]:
        return layout_of(self._loaded.inputs, choice.shape), layout_of(self._loaded.outputs, choice.shape)

    def _has_tokens_axis(self, name: str) -> bool:
        spec, _ = self._loaded.outputs[name]
        return spec.has_tokens_axis
