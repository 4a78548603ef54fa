"""What the simulated GPU must catch: programs that are wrong, each beside the one that is right."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fakes.simulated_device import FIRST_ADDRESS, Code, SimulatedDevice

SEEDS = range(40)
CONTEXT = 0xC0
SIZE = 64


class Gpu:
    """A simulated device, called as programs call it: an error is an exception."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.device = SimulatedDevice(seed, **options)
        self.call("cuCtxPushCurrent", CONTEXT)

    def call(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self.device, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {Code(code).name}")
        return values[0] if values else None

    def stream(self) -> int:
        return self.call("cuStreamCreate", 1)

    def pinned(self, value: int) -> int:
        address = self.call("cuMemHostAlloc", SIZE, 0)
        ctypes.memset(address, value, SIZE)
        return address

    def read(self, pinned: int) -> set[int]:
        return set(ctypes.string_at(pinned, SIZE))


def outcomes(program: Callable[[Gpu], set[int]], **options: Any) -> Iterator[Any]:
    """What a program answers for many orders of execution: a set of bytes, or an error."""
    for seed in SEEDS:
        gpu = Gpu(seed, **options)
        try:
            answer: Any = program(gpu)
        except RuntimeError as error:
            answer = str(error)
        yield (answer, tuple(gpu.device.faults))


def always_right(program: Callable[[Gpu], set[int]]) -> bool:
    return set(map(repr, outcomes(program))) == {repr(({7}, ()))}


def copied_there_and_back(gpu: Gpu, *, wait_for_copy: bool = True, wait_for_result: bool = True) -> set[int]:
    there, back, event = gpu.stream(), gpu.stream(), gpu.call("cuEventCreate", 2)
    source, target, memory = gpu.pinned(7), gpu.pinned(0), gpu.call("cuMemAlloc", SIZE)
    gpu.call("cuMemcpyHtoDAsync", memory, source, SIZE, there)
    gpu.call("cuEventRecord", event, there)
    if wait_for_copy:
        gpu.call("cuStreamWaitEvent", back, event, 0)
    gpu.call("cuMemcpyDtoHAsync", target, memory, SIZE, back)
    if wait_for_result:
        gpu.call("cuStreamSynchronize", back)
    return gpu.read(target)


def test_a_program_that_waits_is_right_in_every_order() -> None:
    assert always_right(copied_there_and_back)


@pytest.mark.parametrize("missing", ["wait_for_copy", "wait_for_result"])
def test_a_missing_wait_is_caught(missing: str) -> None:
    assert not always_right(lambda gpu: copied_there_and_back(gpu, **{missing: False}))


@pytest.mark.parametrize("wait", [True, False])
def test_staging_memory_that_is_written_too_early_is_caught(wait: bool) -> None:
    def program(gpu: Gpu) -> set[int]:
        stream, source, target = gpu.stream(), gpu.pinned(7), gpu.pinned(0)
        memory = gpu.call("cuMemAlloc", SIZE)
        gpu.call("cuMemcpyHtoDAsync", memory, source, SIZE, stream)
        if wait:
            gpu.call("cuStreamSynchronize", stream)
        ctypes.memset(source, 9, SIZE)
        gpu.call("cuMemcpyDtoHAsync", target, memory, SIZE, stream)
        gpu.call("cuStreamSynchronize", stream)
        return gpu.read(target)

    assert always_right(program) is wait


@pytest.mark.parametrize("wait", [True, False])
def test_an_event_that_was_recorded_before_is_no_later_one(wait: bool) -> None:
    def program(gpu: Gpu) -> set[int]:
        first, second, event = gpu.stream(), gpu.stream(), gpu.call("cuEventCreate", 2)
        old, new, target = gpu.pinned(9), gpu.pinned(7), gpu.pinned(0)
        memory = gpu.call("cuMemAlloc", SIZE)
        gpu.call("cuMemcpyHtoDAsync", memory, old, SIZE, first)
        gpu.call("cuEventRecord", event, first)
        gpu.call("cuMemcpyHtoDAsync", memory, new, SIZE, first)
        if wait:
            gpu.call("cuEventRecord", event, first)
        gpu.call("cuStreamWaitEvent", second, event, 0)
        gpu.call("cuMemcpyDtoHAsync", target, memory, SIZE, second)
        gpu.call("cuStreamSynchronize", second)
        return gpu.read(target)

    assert always_right(program) is wait


@pytest.mark.parametrize("wait", [True, False])
def test_memory_that_is_freed_while_it_is_used_is_caught(wait: bool) -> None:
    def program(gpu: Gpu) -> set[int]:
        stream, source, target = gpu.stream(), gpu.pinned(7), gpu.pinned(0)
        memory = gpu.call("cuMemAlloc", SIZE)
        gpu.call("cuMemcpyHtoDAsync", memory, source, SIZE, stream)
        gpu.call("cuMemcpyDtoHAsync", target, memory, SIZE, stream)
        if wait:
            gpu.call("cuStreamSynchronize", stream)
        gpu.call("cuMemFree", memory)
        gpu.call("cuStreamSynchronize", stream)
        return gpu.read(target)

    assert always_right(program) is wait


@pytest.mark.parametrize("wait", [True, False])
def test_pinned_memory_that_is_freed_while_it_is_used_is_caught(wait: bool) -> None:
    def program(gpu: Gpu) -> set[int]:
        stream, source, target = gpu.stream(), gpu.pinned(7), gpu.pinned(0)
        memory = gpu.call("cuMemAlloc", SIZE)
        gpu.call("cuMemcpyHtoDAsync", memory, source, SIZE, stream)
        if wait:
            gpu.call("cuStreamSynchronize", stream)
        gpu.call("cuMemFreeHost", source)
        gpu.call("cuMemcpyDtoHAsync", target, memory, SIZE, stream)
        gpu.call("cuStreamSynchronize", stream)
        return gpu.read(target)

    assert always_right(program) is wait


def refused(gpu: Gpu, stream: int) -> list[str]:
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        gpu.call("cuStreamSynchronize", stream)
    return gpu.device.faults


@pytest.mark.parametrize(("offset", "size"), [(0, SIZE + 1), (-1, 4), (SIZE, 1)])
def test_access_outside_of_memory_is_caught_and_breaks_the_context(offset: int, size: int) -> None:
    gpu = Gpu(0, eagerness=0)
    stream, memory = gpu.stream(), gpu.call("cuMemAlloc", SIZE)
    gpu.call("cuMemsetD8Async", memory + offset, 0, size, stream)
    assert "are no memory of the device" in refused(gpu, stream)[0]
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        gpu.call("cuMemAlloc", SIZE)


def test_memory_of_the_host_that_is_not_pinned_is_caught() -> None:
    gpu = Gpu(0, eagerness=0)
    stream, memory = gpu.stream(), gpu.call("cuMemAlloc", SIZE)
    values = np.zeros(SIZE, np.uint8)
    gpu.call("cuMemcpyHtoDAsync", memory, values.ctypes.data, SIZE, stream)
    assert "are no pinned memory" in refused(gpu, stream)[0]


def test_new_memory_holds_nan_and_has_addresses_of_its_own() -> None:
    gpu = Gpu(0)
    memory = gpu.call("cuMemAlloc", SIZE)
    assert memory >= FIRST_ADDRESS
    assert np.isnan(gpu.device.bytes_at(memory, SIZE).view(np.float32)).all()
    gpu.call("cuMemFree", memory)
    assert gpu.call("cuMemAlloc", SIZE) != memory
    with pytest.raises(RuntimeError, match="cuMemFree: INVALID_VALUE"):
        gpu.call("cuMemFree", memory)


def test_a_thread_without_a_context_is_refused() -> None:
    gpu = Gpu(0)
    gpu.call("cuCtxPopCurrent")
    with pytest.raises(RuntimeError, match="INVALID_CONTEXT"):
        gpu.call("cuMemAlloc", SIZE)


def test_memory_ends_and_comes_back() -> None:
    gpu = Gpu(0)
    gpu.device.free_bytes = SIZE
    memory = gpu.call("cuMemAlloc", SIZE)
    with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
        gpu.call("cuMemAlloc", 1)
    gpu.call("cuMemFree", memory)
    gpu.call("cuMemAlloc", SIZE)


def captured(gpu: Gpu, stream: int, work: Callable[[], None]) -> int:
    mode = SimulatedDevice.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    gpu.call("cuStreamBeginCapture", stream, mode)
    work()
    return gpu.call("cuGraphInstantiate", gpu.call("cuStreamEndCapture", stream), 0)


def test_what_is_captured_runs_when_it_is_launched_and_as_often() -> None:
    gpu = Gpu(0)
    stream, memory = gpu.stream(), gpu.call("cuMemAlloc", SIZE)
    graph = captured(gpu, stream, lambda: gpu.call("cuMemsetD8Async", memory, 7, SIZE, stream))
    gpu.call("cuStreamSynchronize", stream)
    assert set(gpu.device.bytes_at(memory, SIZE)) == {0xFF}
    for _ in range(2):
        gpu.call("cuGraphLaunch", graph, stream)
        gpu.call("cuStreamSynchronize", stream)
        assert set(gpu.device.bytes_at(memory, SIZE)) == {7}
        gpu.device.bytes_at(memory, SIZE).fill(0)


@pytest.mark.parametrize("call", [("cuMemAlloc", 8), ("cuCtxSynchronize",), ("cuStreamSynchronize", None)])
def test_calls_that_break_a_capture_break_it(call: tuple[Any, ...]) -> None:
    gpu = Gpu(0)
    stream = gpu.stream()
    arguments = [stream if argument is None else argument for argument in call[1:]]

    def work() -> None:
        with pytest.raises(RuntimeError, match="STREAM_CAPTURE_UNSUPPORTED"):
            gpu.call(call[0], *arguments)

    with pytest.raises(RuntimeError, match="STREAM_CAPTURE_INVALIDATED"):
        captured(gpu, stream, work)
    graph = captured(gpu, stream, lambda: None)
    gpu.call("cuGraphLaunch", graph, stream)


def test_a_graph_or_stream_that_goes_while_it_works_is_a_fault() -> None:
    gpu = Gpu(0, eagerness=0)
    stream, memory = gpu.stream(), gpu.call("cuMemAlloc", SIZE)
    graph = captured(gpu, stream, lambda: gpu.call("cuMemsetD8Async", memory, 7, SIZE, stream))
    gpu.call("cuGraphLaunch", graph, stream)
    gpu.call("cuGraphExecDestroy", graph)
    gpu.call("cuStreamDestroy", stream)
    assert gpu.device.faults == [
        "a graph was destroyed while it ran",
        "a stream was destroyed that still had work",
    ]


def test_what_is_not_given_back_is_counted() -> None:
    gpu = Gpu(0)
    stream, event, memory = gpu.stream(), gpu.call("cuEventCreate", 0), gpu.call("cuMemAlloc", SIZE)
    assert gpu.device.left() == {"device memory": 1, "Stream": 1, "Event": 1}
    gpu.call("cuStreamDestroy", stream)
    gpu.call("cuEventDestroy", event)
    gpu.call("cuMemFree", memory)
    assert gpu.device.left() == {}
    with pytest.raises(RuntimeError, match="INVALID_HANDLE"):
        gpu.call("cuEventRecord", event, 1)
