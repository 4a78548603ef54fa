"""Execution contexts, scratch memory and CUDA graphs that run the batches of one engine."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hdruntime.backends.tensorrt.contexts import ExecutionContext
from hdruntime.backends.tensorrt.engine import LoadedEngine
from hdruntime.backends.tensorrt.graph_policy import GraphPolicy
from hdruntime.backends.tensorrt.graphs import BatchGraph, CaptureError
from hdruntime.backends.tensorrt.runtime_cache import RuntimeCache
from hdruntime.backends.tensorrt.shapes import choose_profile
from hdruntime.bundle.manifest import ProfileShape
from hdruntime.errors import OutOfMemoryError
from hdruntime.gpu.cuda import Device
from hdruntime.gpu.layout import Layout, ShapeChoice
from hdruntime.gpu.memory import Block
from hdruntime.gpu.slots import Slot

logger = logging.getLogger(__name__)


class EngineModel:
    """An engine that computes batches; see `hdruntime.gpu.model.DeviceModel`.

    Batches do not compute at the same time, so they share the scratch memory. Of the CUDA graphs at most `max_graphs`
    are kept; the least recently used one is closed first.

    Args:
        loaded: closed with this.
        cache: TensorRT-RTX's runtime cache; None for others.
        profiles: profiles of the engine.
        limit: most tokens that a batch of so many tokens may be padded to.
        stream: the one that computes.
    """

    zeroed: Collection[str] = ()

    def __init__(
        self,
        device: Device,
        loaded: LoadedEngine,
        policy: GraphPolicy,
        cache: RuntimeCache | None,
        *,
        profiles: Sequence[ProfileShape],
        limit: Callable[[int], int],
        stream: Any,
        max_graphs: int,
    ) -> None:
        self._device, self._loaded, self._policy, self._cache = device, loaded, policy, cache
        self.inputs, self.outputs = loaded.inputs, loaded.outputs
        self._profiles, self._limit, self._stream = profiles, limit, stream
        self._arena = Block(device, wait=self._wait)
        self._contexts: dict[int, ExecutionContext] = {}
        self._graphs: OrderedDict[ShapeChoice, BatchGraph] = OrderedDict()
        self._max_graphs = max_graphs
        self._graphs_arena = 0

    def choose(self, batch: int, tokens: int, *, memory: int = 0) -> ShapeChoice:
        """See `DeviceModel.choose`; rows or tokens that no profile accepts are an InputError."""
        return choose_profile(self._profiles, batch, tokens, memory=memory, limit=self._limit(tokens))

    def layouts(self, choice: ShapeChoice, outputs: Sequence[str]) -> tuple[Layout, Layout]:
        """All outputs: an engine computes no fewer."""
        return self._loaded.layouts(choice.shape)

    def compute(
        self, slot: Slot, choice: ShapeChoice, inputs: Layout, outputs: Mapping[str, int]
    ) -> Callable[[], object] | None:
        """See `DeviceModel.compute`; a batch's times decide about graphs."""
        if self._cache is not None:
            self._cache.note(choice)
        if (graph := self._graph(slot, choice)) is not None:
            graph.start(slot.inputs.address, outputs)
            return None
        context = self._contexts.get(choice.profile)
        if context is None:
            context = self._contexts[choice.profile] = self._new_context(choice.profile)
        context.prepare(choice)
        self._device.call("cuEventRecord", slot.began, self._stream)
        addresses = slot.inputs.addresses(inputs) | dict(outputs)
        began = time.perf_counter()
        context.enqueue(choice, addresses)
        took_ms = (time.perf_counter() - began) * 1000
        return lambda: self._policy.ran(choice, enqueue_ms=took_ms, gpu_ms=slot.gpu_ms())

    @property
    def engine_bytes(self) -> int | None:
        """Bytes of the weights, and of scratch memory for the largest shape so far; None if TensorRT does not say."""
        weights_bytes = self._loaded.weights_bytes
        return None if weights_bytes is None else weights_bytes + self._arena.size

    def release(self) -> None:
        """Free graphs and scratch memory."""
        self._drop_graphs()
        self._arena.release()

    def close(self) -> None:
        """Free everything, the engine also where something else cannot be freed."""
        try:
            if self._cache is not None:
                self._cache.save()
            self._drop_graphs()
            for context in self._contexts.values():
                context.close()
            self._arena.release()
        finally:
            self._loaded.close()

    def _wait(self) -> None:
        self._device.call("cuStreamSynchronize", self._stream)

    def _new_context(self, profile: int) -> ExecutionContext:
        return ExecutionContext(self._loaded, self._device, profile, self._stream, self._arena)

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
            if len(self._graphs) > self._max_graphs:
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
            graph = BatchGraph(self._device, self._stream, context, choice, *self._loaded.layouts(choice.shape))
            graph.check(slot.inputs.address, slot.staged_outputs)
            checked, graph = graph, None
            return checked
        except OutOfMemoryError as error:
            logger.info("no CUDA graph for %s: %s", choice.shape, error)
            self._policy.reject(choice)
        except CaptureError as error:
            self._policy.switch_off(str(error))
            self._drop_graphs()
        finally:
            if graph is not None:
                graph.close()
        return None
