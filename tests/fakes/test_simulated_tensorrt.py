"""The simulated TensorRT gives NaN, or refuses, when contexts are used wrongly."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest

from fakes.simulated_device import SimulatedDevice
from fakes.simulated_tensorrt import SimulatedTensorRt, simulated_engine
from hdruntime.bundle.manifest import ProfileShape
from support.comparators import named_case
from support.onnx_models import parsed_model

pytest.importorskip("tensorrt_rtx", reason="enumerations are TensorRT-RTX's: pip install 'hdexport[rtx]'")

PROFILE = ProfileShape(batch=(1, 1, 4), tokens=(1, 8, 8))
SHAPE = (2, 8)


MODEL = parsed_model(
    {"ids": "int64[batch, tokens]"},
    {"out": "float[batch, tokens]"},
    """
        sum = Add(ids, ids)
        out = Cast<to: int = 1>(sum)
    """,
).SerializeToString()


class Program:
    """An engine with its memory, ready to run."""

    def __init__(self, seed: int = 0) -> None:
        self.device = SimulatedDevice(seed)
        self.trt = SimulatedTensorRt(self.device, "tensorrt")
        self.messages: list[str] = []

        class Logger(self.trt.ILogger):
            log = staticmethod(lambda severity, message: self.messages.append(message))

        self.device.cuCtxPushCurrent(0xC0)
        self.engine = self.trt.Runtime(Logger()).deserialize_cuda_engine(simulated_engine(MODEL, [PROFILE]))
        self.config = self.engine.create_runtime_config()
        self.config.set_execution_context_allocation_strategy(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        self.ids = np.arange(16).reshape(SHAPE)
        self.input, self.output = (self.device.upload(values) for values in (self.ids, np.zeros(SHAPE, np.float32)))
        self.scratch = self.device.upload(np.zeros(1 << 14, np.uint8))
        self.stream = self.device.cuStreamCreate(1)[1]

    def context(self, scratch: int | None = None) -> Any:
        context = self.engine.create_execution_context(self.config)
        context.set_optimization_profile_async(0, self.stream)
        context.set_input_shape("ids", SHAPE)
        context.set_device_memory(scratch or self.scratch, context.update_device_memory_size_for_shapes())
        context.set_tensor_address("ids", self.input)
        context.set_tensor_address("out", self.output)
        return context

    def capture(self, context: Any) -> int:
        mode = self.device.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.device.cuStreamBeginCapture(self.stream, mode)
        assert context.execute_async_v3(self.stream)
        return self.device.cuGraphInstantiate(self.device.cuStreamEndCapture(self.stream)[1], 0)[1]

    def answer(self, address: int | None = None) -> np.ndarray:
        self.device.cuCtxSynchronize()
        return self.device.bytes_at(address or self.output, 64).view(np.float32).reshape(SHAPE)


def test_scratch_memory_that_two_streams_share_is_caught() -> None:
    for apart in [True, False]:
        with named_case(apart):
            wrong = 0
            for seed in range(30):
                program = Program(seed)
                other = program.device.upload(np.zeros(1 << 14, np.uint8)) if apart else None
                contexts = [program.context(), program.context(other)]
                second = program.device.upload(np.zeros(SHAPE, np.float32))
                contexts[1].set_tensor_address("out", second)
                streams = [program.stream, program.device.cuStreamCreate(1)[1]]
                for context, stream in zip(contexts, streams, strict=True):
                    assert context.execute_async_v3(stream)
                wrong += any(np.isnan(program.answer(address)).any() for address in (program.output, second))
            assert (wrong == 0) is apart


@pytest.mark.parametrize("change", ["nothing", "shape", "scratch", "gone"])
def test_a_graph_depends_on_its_context(change: str) -> None:
    program = Program()
    context = program.context()
    assert context.execute_async_v3(program.stream)
    graph = program.capture(context)
    if change == "shape":
        context.set_input_shape("ids", (1, 8))
    elif change == "scratch":
        context.set_device_memory(program.device.upload(np.zeros(1 << 14, np.uint8)), 1 << 14)
    elif change == "gone":
        del context
    program.device.bytes_at(program.output, 64).fill(0)
    program.device.cuGraphLaunch(graph, program.stream)
    assert np.isnan(program.answer()).all() == (change != "nothing")


def test_a_shape_that_was_never_enqueued_cannot_be_captured() -> None:
    program = Program()
    context = program.context()
    mode = program.device.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    program.device.cuStreamBeginCapture(program.stream, mode)
    assert not context.execute_async_v3(program.stream)
    assert program.messages == ["operation not permitted when stream is capturing"]
    assert program.device.cuStreamEndCapture(program.stream)[0]


def test_scratch_memory_that_is_too_small_or_was_measured_for_another_shape_is_refused() -> None:
    program = Program()
    context = program.context()
    context.set_device_memory(program.scratch, 10)
    assert not context.execute_async_v3(program.stream)
    context = program.context()
    context.set_input_shape("ids", (1, 8))
    assert not context.execute_async_v3(program.stream)
    assert len(program.messages) == 2


def test_what_stands_in_for_a_tensorrt_that_is_missing_has_its_names() -> None:
    import tensorrt_rtx

    from fakes import bare_tensorrt

    for name, ours in vars(bare_tensorrt).items():
        if name.startswith("_") or getattr(ours, "__module__", "") != bare_tensorrt.__name__:
            continue
        real = getattr(tensorrt_rtx, name)
        if isinstance(ours, type) and issubclass(ours, enum.Enum):
            assert set(ours.__members__) <= set(real.__members__), name
    assert set(bare_tensorrt.ILogger.Severity.__members__) == set(tensorrt_rtx.ILogger.Severity.__members__)
