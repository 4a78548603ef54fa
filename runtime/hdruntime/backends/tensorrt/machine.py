"""What runs batches on the GPU: streams, contexts, scratch memory and graphs of one engine."""

from __future__ import annotations

__all__ = ["Machine"]

import logging
import time
from collections.abc import Mapping

from hdruntime.backends.tensorrt.contexts import ExecutionContext
from hdruntime.backends.tensorrt.engine import LoadedEngine
from hdruntime.backends.tensorrt.graph_policy import GraphPolicy, LruCache
from hdruntime.backends.tensorrt.graphs import BatchGraph, CaptureError
from hdruntime.backends.tensorrt.layout import layout_of
from hdruntime.backends.tensorrt.memory import Block
from hdruntime.backends.tensorrt.shapes import Choice
from hdruntime.backends.tensorrt.slots import Slot
from hdruntime.errors import OutOfMemoryError
from hdruntime.gpu.cuda import Device

logger = logging.getLogger(__name__)

_NON_BLOCKING = 1
"""``CU_STREAM_NON_BLOCKING``: the stream does not wait for the legacy default stream."""


class Machine:
    """Computes batches in the order that they are given, on one stream.

    Copies have streams of their own and overlap with computing; batches do not compute at the same time, so that they
    share the scratch memory.

    Args:
        device: the GPU; its context is current here and in every call.
        loaded: the engine.
        policy: when to use CUDA graphs.
        most_graphs: graphs that are kept.

    Attributes:
        copying_in: stream of the copies to the device.
        computing: stream of the engine.
        copying_out: stream of the copies from the device.
        slots: two, taken in turn.
    """

    def __init__(self, device: Device, loaded: LoadedEngine, policy: GraphPolicy, *, most_graphs: int) -> None:
        self._device, self._loaded, self._policy = device, loaded, policy
        self.copying_in, self.computing, self.copying_out = (
            device.call("cuStreamCreate", _NON_BLOCKING) for _ in range(3)
        )
        self.slots = (Slot(device), Slot(device))
        self._arena = Block(device, wait=lambda: device.call("cuStreamSynchronize", self.computing))
        self._contexts: dict[int, ExecutionContext] = {}
        self._graphs: LruCache[Choice, BatchGraph] = LruCache(most_graphs, BatchGraph.close)
        self._graphs_arena = 0

    def compute(self, slot: Slot, choice: Choice, outputs: Mapping[str, int]) -> float | None:
        """Start a batch whose inputs are in the slot.

        Args:
            slot: its inputs are there for the computing stream; its memory suffices.
            choice: profile and shape.
            outputs: name -> address on the device, of all outputs.

        Returns:
            what the CPU took to enqueue it, in milliseconds; None where a graph was used.

        Raises:
            BackendError: TensorRT or the driver refuses.
            OutOfMemoryError: there is too little memory.
        """
        if (graph := self._graph(slot, choice)) is not None:
            graph.start(slot.inputs.address, outputs)
            self._device.call("cuEventRecord", slot.computed, self.computing)
            return None
        context = self._context(choice.profile)
        context.prepare(choice)
        self._device.call("cuEventRecord", slot.began, self.computing)
        inputs = slot.inputs.addresses(layout_of(self._loaded.inputs, choice.shape))
        began = time.perf_counter()
        context.enqueue(choice, inputs | dict(outputs))
        took_ms = (time.perf_counter() - began) * 1000
        self._device.call("cuEventRecord", slot.computed, self.computing)
        return took_ms

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory that the contexts share: what TensorRT asked for, for the largest shape so far."""
        return self._arena.size

    def settle(self) -> None:
        """Wait for everything that was enqueued."""
        for stream in (self.copying_in, self.computing, self.copying_out):
            self._device.call("cuStreamSynchronize", stream)

    def release(self) -> None:
        """Give back what is only there for the next batch to be fast: graphs, scratch memory, buffers of free slots."""
        self.settle()
        self._graphs.clear()
        self._arena.release()
        for slot in self.slots:
            if not slot.busy:
                slot.release()

    def close(self) -> None:
        """Give everything back; the slots are free."""
        self.settle()
        self._graphs.clear()
        for context in self._contexts.values():
            context.close()
        self._arena.release()
        for slot in self.slots:
            slot.close()
        for stream in (self.copying_in, self.computing, self.copying_out):
            self._device.call("cuStreamDestroy", stream)

    def _context(self, profile: int) -> ExecutionContext:
        if profile not in self._contexts:
            self._contexts[profile] = self._new_context(profile)
        return self._contexts[profile]

    def _new_context(self, profile: int) -> ExecutionContext:
        return ExecutionContext(self._loaded, self._device, profile, self.computing, self._arena)

    def _graph(self, slot: Slot, choice: Choice) -> BatchGraph | None:
        if self._graphs_arena != self._arena.moves:
            # Graphs hold the scratch memory's old address.
            self._graphs.clear()
            self._graphs_arena = self._arena.moves
        graph = self._graphs.get(choice)
        if graph is None and self._policy.wants(choice):
            graph = self._captured(slot, choice)
            if graph is not None:
                self._graphs.put(choice, graph)
        return graph

    def _captured(self, slot: Slot, choice: Choice) -> BatchGraph | None:
        """A graph that was checked with the batch in the slot; None where there is to be none."""
        layouts = layout_of(self._loaded.inputs, choice.shape), layout_of(self._loaded.outputs, choice.shape)
        graph = None
        try:
            context = self._new_context(choice.profile)
            graph = BatchGraph(self._device, self.computing, context, choice, *layouts)
            graph.check(slot.inputs.address, slot.staged_outputs)
        except OutOfMemoryError as error:
            logger.info("no CUDA graph for %s: %s", choice.shape, error)
            self._policy.refuse(choice)
        except CaptureError as error:
            self._policy.switch_off(str(error))
            self._graphs.clear()
        else:
            return graph
        if graph is not None:
            graph.close()
        return None
