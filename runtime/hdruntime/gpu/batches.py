"""Batches: padded into staging memory, copied to the GPU, computed, and copied back."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import numpy as np
import numpy.typing as npt

from hdruntime.arrays import Inputs, Outputs
from hdruntime.gpu.cuda import Device
from hdruntime.gpu.device_arrays import DeviceArray
from hdruntime.gpu.device_inputs import DeviceInput, copy_to_device, values_of
from hdruntime.gpu.device_states import DeviceStates
from hdruntime.gpu.layout import Layout, ShapeChoice, layout_of, padding_ranges
from hdruntime.gpu.model import DeviceModel
from hdruntime.gpu.slots import Pipeline, Slot


class Batches:
    """Starts batches of one model, and collects their results.

    The GPU's context must be current where batches are started. `fill` has the padding value of inputs by name; 0 for
    others.
    """

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        pipeline: Pipeline,
        *,
        mask: str,
        fill: Mapping[str, int],
    ) -> None:
        self._device, self._model, self._pipeline = device, model, pipeline
        self._mask, self._fill = mask, fill

    def start(
        self,
        slot: Slot,
        choice: ShapeChoice,
        inputs: Inputs,
        outputs: list[str],
        *,
        states: DeviceStates | None = None,
    ) -> Callable[[], Outputs]:
        """Begin a batch in a free slot, and return a function that waits for the results and copies them out of the
        slot.

        Args:
            choice: the shape to pad the batch to.
            inputs: arrays with the types and shapes of the manifest.
            states: states on the GPU that the batch reads and replaces; None if they are among the inputs.

        Raises:
            BackendError: the model or the driver reports an error; some of the work may already be enqueued.
            OutOfMemoryError: the GPU has too little memory; likewise.
        """
        next_states = () if states is None else states.fed_from.values()
        layouts = self._model.layouts(choice, list(dict.fromkeys((*outputs, *next_states))))
        slot.ensure(*layouts)
        self._stage(slot, layouts[0], inputs, but=() if states is None else states.fed_from)
        call, pipeline = self._device.call, self._pipeline
        size = layouts[0].size
        if states is not None:
            size = min(layouts[0].places[name].offset for name in states.fed_from)
        call("cuMemcpyHtoDAsync", slot.inputs.address, slot.staged_inputs.address, size, pipeline.copying_in)
        call("cuEventRecord", slot.copied_in, pipeline.copying_in)
        call("cuStreamWaitEvent", pipeline.computing, slot.copied_in, 0)
        if states is not None:
            states.read(slot.inputs.addresses(layouts[0]), layouts[0])
        computed = self._compute(slot, choice, layouts[0], slot.outputs.addresses(layouts[1]))
        if states is not None:
            states.replace(slot.outputs.addresses(layouts[1]))
        call("cuStreamWaitEvent", pipeline.copying_out, slot.computed, 0)
        for name in outputs:
            place = layouts[1].places[name]
            staged, address = slot.staged_outputs.address + place.offset, slot.outputs.address + place.offset
            call("cuMemcpyDtoHAsync", staged, address, place.size, pipeline.copying_out)
        call("cuEventRecord", slot.copied_out, pipeline.copying_out)
        padding = inputs[self._mask] == 0
        return lambda: self._collected(slot, layouts[1], outputs, padding, computed)

    def start_on_device(
        self, slot: Slot, choice: ShapeChoice, inputs: Mapping[str, DeviceInput], outputs: list[str]
    ) -> tuple[dict[str, DeviceArray], Callable[[], Outputs]]:
        """Begin a batch that is on the GPU; its inputs, which the copying stream may read, have been read on return.

        Returns the results, and a function that waits until the slot is free again and returns no arrays.
        """
        layouts = self._model.layouts(choice, [])
        slot.ensure(*layouts)
        padding = self._copied_in(slot, layouts[0], inputs)
        places = layout_of({name: self._model.outputs[name] for name in outputs}, choice.shape).places
        shape = inputs[self._mask].shape
        results = {}
        for name, place in places.items():
            axes = shape if self._has_tokens_axis(name) else shape[:1]
            results[name] = DeviceArray(self._device, (*axes, *place.shape[len(axes) :]), padded=place.shape)
        addresses = {name: result.address for name, result in results.items()}
        computed = self._compute(slot, choice, layouts[0], slot.outputs.addresses(layouts[1]) | addresses)
        for name, result in results.items():
            if self._has_tokens_axis(name) and name not in self._model.zeroed:
                size = places[name].size // math.prod(places[name].shape[:2])
                for first, end in padding:
                    where, length = result.address + first * size, (end - first) * size
                    self._device.call("cuMemsetD8Async", where, 0, length, self._pipeline.computing)
            result.mark_ready(self._pipeline.computing)
        return results, lambda: self._computed(slot, computed)

    def _compute(
        self, slot: Slot, choice: ShapeChoice, layout: Layout, outputs: Mapping[str, int]
    ) -> Callable[[], object] | None:
        computed = self._model.compute(slot, choice, layout, outputs)
        self._device.call("cuEventRecord", slot.computed, self._pipeline.computing)
        return computed

    def _computed(self, slot: Slot, computed: Callable[[], object] | None) -> Outputs:
        """Wait until a batch is computed."""
        with self._device.current():
            self._device.call("cuEventSynchronize", slot.computed)
            if computed is not None:
                computed()
        return {}

    def _collected(
        self,
        slot: Slot,
        layout: Layout,
        outputs: list[str],
        padding: npt.NDArray[np.bool_],
        computed: Callable[[], object] | None,
    ) -> Outputs:
        """Wait for a batch and copy its results out of the staging memory."""
        with self._device.current():
            self._device.call("cuEventSynchronize", slot.copied_out)
        self._computed(slot, computed)
        rows, tokens = padding.shape
        staged, is_padded = slot.staged_outputs.arrays(layout), padding.any()
        results = {}
        for name in outputs:
            if self._has_tokens_axis(name):
                results[name] = staged[name][:rows, :tokens].copy()
                if is_padded and name not in self._model.zeroed:
                    results[name][padding] = 0
            else:
                results[name] = staged[name][:rows].copy()
        return results

    def _copied_in(self, slot: Slot, layout: Layout, inputs: Mapping[str, DeviceInput]) -> list[tuple[int, int]]:
        """Copy inputs into the slot and wait for the copies; returns the padding, as (first, end) in the slot's
        flattened rows."""
        call, stream = self._device.call, self._pipeline.copying_in
        self._stage(slot, layout, {})
        staged, alike = slot.staged_inputs.arrays(layout), {}
        for name, array in inputs.items():
            if array.dtype == layout.places[name].dtype:
                alike[name] = array
                continue
            # Integers of another width, 4 or 8 bytes a token, are converted on the CPU: the caller waits here anyway.
            rows, tokens = array.shape
            staged[name].reshape(len(staged[name]), -1)[:rows, :tokens] = values_of(self._device, array, stream)
        call("cuMemcpyHtoDAsync", slot.inputs.address, slot.staged_inputs.address, layout.size, stream)
        for name, array in alike.items():
            place = layout.places[name]
            copy_to_device(self._device, array, slot.inputs.address + place.offset, place, stream)
        # Results are 0 where the mask is 0: only the mask is copied to the CPU.
        place = layout.places[self._mask]
        staged_mask = slot.staged_inputs.address + place.offset
        call("cuMemcpyDtoHAsync", staged_mask, slot.inputs.address + place.offset, place.size, stream)
        call("cuEventRecord", slot.copied_in, stream)
        call("cuEventSynchronize", slot.copied_in)
        return padding_ranges(staged[self._mask][: inputs[self._mask].shape[0]])

    def _stage(self, slot: Slot, layout: Layout, inputs: Inputs, but: Collection[str] = ()) -> None:
        """Write all inputs but some, padded to the shape of the layout, to the slot's staging memory."""
        for name, staged in slot.staged_inputs.arrays(layout).items():
            if name in but:
                continue
            staged.fill(self._fill.get(name, 0))
            if name in inputs:
                # Fewer rows, and fewer tokens if the input has that axis.
                staged[tuple(slice(size) for size in inputs[name].shape)] = inputs[name]

    def _has_tokens_axis(self, name: str) -> bool:
        spec, _ = self._model.outputs[name]
        return spec.has_tokens_axis
