"""Streams, execution contexts, scratch memory and CUDA graphs that run the batches of one engine."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping

from hdruntime.backends.tensorrt.contexts import ExecutionContext
from hdruntime.backends.tensorrt.engine import LoadedEngine
from hdruntime.backends.tensorrt.graph_policy import GraphPolicy
from hdruntime.backends.tensorrt.graphs import BatchGraph, CaptureError
from hdruntime.backends.tensorrt.shapes import ShapeChoice
from hdruntime.errors import OutOfMemoryError
from hdruntime.gpu.cuda import Device
from hdruntime.gpu.layout import Layout
from hdruntime.gpu.memory import Block
from hdruntime.gpu.slots import Slot

logger = logging.getLogger(__name__)

_NON_BLOCKING = 1
"""``CU_STREAM_NON_BLOCKING``: the stream does not wait for the legacy default stream."""


class Machine:
    """Computes batches in order on one stream; the GPU's context must be current in every call.

    Copies run on separate streams and overlap with computing; batches do not compute at the same time, so they share
    the scratch memory. Of the CUDA graphs at most `most_graphs` are kept; the least recently used one is closed first.

    Attributes:
        copying_in: stream of the copies to the device.
        computing: stream of the engine.
        copying_out: stream of the copies from the device.
        slots: two, used alternately.
    """

    def __init__(self, device: Device, loaded: LoadedEngine, policy: GraphPolicy, *, most_graphs: int) -> None:
        self._device, self._loaded, self._policy = device, loaded, policy
        self.copying_in, self.computing, self.copying_out = (
            device.call("cuStreamCreate", _NON_BLOCKING) for _ in range(3)
        )
        self.slots = (Slot(device), Slot(device))
        self._arena = Block(device, wait=lambda: device.call("cuStreamSynchronize", self.computing))
        self._contexts: dict[int, ExecutionContext] = {}
        self._graphs: OrderedDict[ShapeChoice, BatchGraph] = OrderedDict()
        self._most_graphs = most_graphs
        self._graphs_arena = 0

    def compute(self, slot: Slot, choice: ShapeChoice, inputs: Layout, outputs: Mapping[str, int]) -> float | None:
        """Start a batch whose inputs are in the slot, which the computing stream may read.

        Returns the CPU's time to enqueue it, in milliseconds; None if a graph ran.

        Args:
            inputs: layout of the inputs in the slot.
            outputs: name -> address on the device, of all outputs.
        """
        if (graph := self._graph(slot, choice)) is not None:
            graph.start(slot.inputs.address, outputs)
            self._device.call("cuEventRecord", slot.computed, self.computing)
            return None
        context = self._contexts.get(choice.profile)
        if context is None:
            context = self._contexts[choice.profile] = self._new_context(choice.profile)
        context.prepare(choice)
        self._device.call("cuEventRecord", slot.began, self.computing)
        addresses = slot.inputs.addresses(inputs) | dict(outputs)
        began = time.perf_counter()
        context.enqueue(choice, addresses)
        took_ms = (time.perf_counter() - began) * 1000
        self._device.call("cuEventRecord", slot.computed, self.computing)
        return took_ms

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory that the contexts share: TensorRT's request for the largest shape so far."""
        return self._arena.size

    def settle(self) -> None:
        """Wait for all enqueued work."""
        for stream in (self.copying_in, self.computing, self.copying_out):
            self._device.call("cuStreamSynchronize", stream)

    def release(self) -> None:
        """Free everything that only speeds up the next batch: graphs, scratch memory, buffers of free slots."""
        self.settle()
        self._drop_graphs()
        self._arena.release()
        for slot in self.slots:
            if not slot.busy:
                slot.release()

    def close(self) -> None:
        """Free everything; no slot may be in use."""
        self.settle()
        self._drop_graphs()
        for context in self._contexts.values():
            context.close()
        self._arena.release()
        for slot in self.slots:
            slot.close()
        for stream in (self.copying_in, self.computing, self.copying_out):
            self._device.call("cuStreamDestroy", stream)

    def _new_context(self, profile: int) -> ExecutionContext:
        return ExecutionContext(self._loaded, self._device, profile, self.computing, self._arena)

    def _graph(self, slot: Slot, choice: ShapeChoice) -> BatchGraph | None:
        if self._graphs_arena != self._arena.moves:
            # Graphs hold the scratch memory's old address.
            self._drop_graphs()
            self._graphs_arena = self._arena.moves
        if choice in self._graphs:
            self._graphs.move_to_end(choice)
            return self._graphs[choice]
        graph = self._captured(slot, choice) if self._policy.wants(choice) else None
        if graph is not None:
            self._graphs[choice] = graph
            if len(self._graphs) > self._most_graphs:
                self._graphs.popitem(last=False)[1].close()
        return graph

    def _drop_graphs(self) -> None:
        while self._graphs:
            self._graphs.popitem()[1].close()

    def _captured(self, slot: Slot, choice: ShapeChoice) -> BatchGraph | None:
        """A new graph, checked with the batch in the slot; None if the shape cannot have one."""
        graph = None
        try:
            context = self._new_context(choice.profile)
            graph = BatchGraph(self._device, self.computing, context, choice, *self._loaded.layouts(choice.shape))
            graph.check(slot.inputs.address, slot.staged_outputs)
            checked, graph = graph, None
            return checked
        except OutOfMemoryError as error:
            logger.info("no CUDA graph for %s: %s", choice.shape, error)
            self._policy.refuse(choice)
        except CaptureError as error:
            self._policy.switch_off(str(error))
            self._drop_graphs()
        finally:
            if graph is not None:
                graph.close()
        return None
