"""CUDA graphs of batches: captured in a separate execution context, and checked before use.

TensorRT-RTX can capture graphs by itself, but captures again whenever an address changes, and input and output buffers
alternate between batches here; nor can its graphs be counted, bounded, or compared with a run without them. So all
variants use these graphs. TensorRT-RTX with lazy compilation replaces kernels between runs and uses none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdruntime.arrays import FloatArray
from hdruntime.backends.tensorrt.contexts import ExecutionContext
from hdruntime.backends.tensorrt.graph_policy import same_answers
from hdruntime.errors import BackendError, OutOfMemoryError
from hdruntime.gpu.cuda import Device
from hdruntime.gpu.layout import Layout, ShapeChoice
from hdruntime.gpu.memory import Block

_NAN_BYTE = 0xFF
"""Floating-point numbers of only such bytes are NaN."""


class CaptureError(Exception):
    """The stream cannot be captured, or a replay gives a different result: graphs are unusable."""


class BatchGraph:
    """A batch of one shape, as a graph that owns the buffers it reads and writes.

    A graph depends on the state of the context that it was captured from (TensorRT, Best Practices, CUDA Graphs), so it
    has a context of its own, of the shape's profile. It also holds the address of the scratch memory: if the arena
    moves, the graph is invalid. The stream is captured, and runs the graph.
    """

    def __init__(
        self,
        device: Device,
        stream: Any,
        context: ExecutionContext,
        choice: ShapeChoice,
        inputs: Layout,
        outputs: Layout,
    ) -> None:
        self._device, self._stream, self._context, self._choice = device, stream, context, choice
        self._layouts = inputs, outputs
        self._inputs, self._outputs = (Block(device, wait=self._wait) for _ in range(2))
        self._executable: Any = None

    def check(self, inputs: int, staging: Block) -> None:
        """Run a batch without a graph, capture it, replay it and compare the two; a difference raises CaptureError.

        `inputs` is an address on the device, laid out as the graph's; `staging` is pinned memory for the outputs, not
        in use meanwhile.
        """
        sizes = [layout.size for layout in self._layouts]
        self._inputs.ensure(sizes[0])
        self._outputs.ensure(sizes[1])
        places = [self._inputs.addresses(self._layouts[0]), self._outputs.addresses(self._layouts[1])]
        self._device.call("cuMemcpyDtoDAsync", self._inputs.address, inputs, sizes[0], self._stream)
        self._context.enqueue(self._choice, places[0] | places[1])
        eager = self._downloaded(staging)
        self._capture()
        self._device.call("cuMemsetD8Async", self._outputs.address, _NAN_BYTE, sizes[1], self._stream)
        self._device.call("cuGraphLaunch", self._executable, self._stream)
        replayed = self._downloaded(staging)
        for name, values in eager.items():
            if not same_answers(values, replayed[name]):
                raise CaptureError(f"for {self._choice} the output {name} of a graph differs from a run without one.")

    def start(self, inputs: int, outputs: Mapping[str, int]) -> None:
        """Copy a batch in, replay it, and copy the results out to their addresses on the device, all on the stream."""
        self._device.call("cuMemcpyDtoDAsync", self._inputs.address, inputs, self._layouts[0].size, self._stream)
        self._device.call("cuGraphLaunch", self._executable, self._stream)
        for name, address in outputs.items():
            place = self._layouts[1].places[name]
            source = self._outputs.address + place.offset
            self._device.call("cuMemcpyDtoDAsync", address, source, place.size, self._stream)

    def close(self) -> None:
        """Free the graph, its buffers and its context after the GPU has finished with them."""
        self._wait()
        if self._executable is not None:
            executable, self._executable = self._executable, None
            self._device.call("cuGraphExecDestroy", executable)
        self._inputs.release()
        self._outputs.release()
        self._context.close()

    def _capture(self) -> None:
        if not self._context.is_capturable():
            raise CaptureError("TensorRT-RTX cannot be captured with this engine.")
        graph = None
        mode = self._device.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        try:
            with self._device.capturing():
                self._device.call("cuStreamBeginCapture", self._stream, mode)
                try:
                    self._context.enqueue_again(self._choice)
                finally:
                    # A failed capture must be ended too, or the stream stays unusable.
                    graph = self._device.call("cuStreamEndCapture", self._stream)
            self._executable = self._device.call("cuGraphInstantiate", graph, 0)
        except OutOfMemoryError:
            raise
        except BackendError as error:
            raise CaptureError(f"a batch cannot be captured: {error}") from error
        finally:
            if graph is not None and int(graph):
                self._device.call("cuGraphDestroy", graph)

    def _downloaded(self, staging: Block) -> dict[str, FloatArray]:
        layout = self._layouts[1]
        self._device.call("cuMemcpyDtoHAsync", staging.address, self._outputs.address, layout.size, self._stream)
        self._wait()
        return {name: values.copy() for name, values in staging.arrays(layout).items()}

    def _wait(self) -> None:
        self._device.call("cuStreamSynchronize", self._stream)
