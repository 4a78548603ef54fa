"""The simulated GPU catches wrong programs; each is tested beside the right one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fakes.simulated_device import FIRST_ADDRESS, SimulatedDevice
from hdruntime.errors import BackendError
from hdruntime.gpu.cuda import Device

SEEDS = range(40)
CONTEXT = 0xC0
SIZE = 64


class Gpu(Device):
    """A simulated GPU, called as programs call it: an error is an exception."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(SimulatedDevice(seed, **options), 0)
        self.device: SimulatedDevice = self.driver
        self.call("cuCtxPushCurrent", CONTEXT)

    def stream(self) -> int:
        return self.call("cuStreamCreate", 1)

    def pinned(self, value: int) -> int:
        address = self.call("cuMemHostAlloc", SIZE, 0)
        ctypes.memset(address, value, SIZE)
        return address

    def read(self, pinned: int) -> set[int]:
        return set(ctypes.string_at(pinned, SIZE))


PROGRAMS = {
    "a stream waits for a copy": "up_7 record *await down_2 wait_2",
    "the host waits for a result": "up_7 record await down_2 *wait_2",
    "staging memory is written again": "up_7 *wait_1 overwrite down_1 wait_1",
    "an event that was recorded before is not a later one": "up_9 record up_7 *record await down_2 wait_2",
    "memory is freed": "up_7 down_1 *wait_1 free wait_1",
    "pinned memory is freed": "up_7 *wait_1 free_pinned down_1 wait_1",
}
"""Steps that copy 7 to the GPU and back, on streams 1 and 2; without the starred step a program is wrong."""


def result_of(steps: list[str], gpu: Gpu) -> set[int]:
    first, second, event = gpu.stream(), gpu.stream(), gpu.call("cuEventCreate", 2)
    seven, nine, target = gpu.pinned(7), gpu.pinned(9), gpu.pinned(0)
    memory = gpu.call("cuMemAlloc", SIZE)
    calls = {
        "up_7": ("cuMemcpyHtoDAsync", memory, seven, SIZE, first),
        "up_9": ("cuMemcpyHtoDAsync", memory, nine, SIZE, first),
        "down_1": ("cuMemcpyDtoHAsync", target, memory, SIZE, first),
        "down_2": ("cuMemcpyDtoHAsync", target, memory, SIZE, second),
        "record": ("cuEventRecord", event, first),
        "await": ("cuStreamWaitEvent", second, event, 0),
        "wait_1": ("cuStreamSynchronize", first),
        "wait_2": ("cuStreamSynchronize", second),
        "free": ("cuMemFree", memory),
        "free_pinned": ("cuMemFreeHost", seven),
    }
    for step in steps:
        if step == "overwrite":
            ctypes.memset(seven, 9, SIZE)
        else:
            gpu.call(*calls[step])
    return gpu.read(target)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_is_right_in_every_order_where_it_waits_and_wrong_in_some_where_not(program: str) -> None:
    for right in (True, False):
        steps = [step.lstrip("*") for step in program.split() if right or step[0] != "*"]
        failures = 0
        for seed in SEEDS:
            gpu = Gpu(seed)
            try:
                failures += result_of(steps, gpu) != {7} or bool(gpu.device.faults)
            except BackendError:
                failures += 1
        assert (failures == 0) is right


def refused(gpu: Gpu, stream: int) -> list[str]:
    with pytest.raises(BackendError, match="illegal_address"):
        gpu.call("cuStreamSynchronize", stream)
    return gpu.device.faults


@pytest.mark.parametrize(("offset", "size"), [(0, SIZE + 1), (-1, 4)])
def test_access_outside_of_memory_is_caught_and_breaks_the_context(offset: int, size: int) -> None:
    gpu = Gpu(0, eagerness=0)
    stream, memory = gpu.stream(), gpu.call("cuMemAlloc", SIZE)
    gpu.call("cuMemsetD8Async", memory + offset, 0, size, stream)
    assert "are not device memory" in refused(gpu, stream)[0]
    with pytest.raises(BackendError, match="illegal_address"):
        gpu.call("cuMemAlloc", SIZE)


def test_memory_of_the_host_that_is_not_pinned_is_caught() -> None:
    gpu = Gpu(0, eagerness=0)
    stream, memory = gpu.stream(), gpu.call("cuMemAlloc", SIZE)
    values = np.zeros(SIZE, np.uint8)
    gpu.call("cuMemcpyHtoDAsync", memory, values.ctypes.data, SIZE, stream)
    assert "are not pinned memory" in refused(gpu, stream)[0]


def test_new_memory_holds_nan_and_has_addresses_of_its_own() -> None:
    gpu = Gpu(0)
    memory = gpu.call("cuMemAlloc", SIZE)
    assert memory >= FIRST_ADDRESS
    assert np.isnan(gpu.device.bytes_at(memory, SIZE).view(np.float32)).all()
    gpu.call("cuMemFree", memory)
    assert gpu.call("cuMemAlloc", SIZE) != memory
    with pytest.raises(BackendError, match="cuMemFree: invalid_value"):
        gpu.call("cuMemFree", memory)


def test_a_thread_without_a_context_is_refused() -> None:
    gpu = Gpu(0)
    gpu.call("cuCtxPopCurrent")
    with pytest.raises(BackendError, match="invalid_context"):
        gpu.call("cuMemAlloc", SIZE)


def captured(gpu: Gpu, stream: int, work: Callable[[], None]) -> int:
    mode = SimulatedDevice.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    gpu.call("cuStreamBeginCapture", stream, mode)
    work()
    return gpu.call("cuGraphInstantiate", gpu.call("cuStreamEndCapture", stream), 0)


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuStreamSynchronize"])
def test_calls_that_break_a_capture_break_it(call: str) -> None:
    gpu = Gpu(0)
    stream = gpu.stream()

    def work() -> None:
        with pytest.raises(BackendError, match="stream_capture_unsupported"):
            gpu.call(call, stream)

    with pytest.raises(BackendError, match="stream_capture_invalidated"):
        captured(gpu, stream, work)
    graph = captured(gpu, stream, lambda: None)
    gpu.call("cuGraphLaunch", graph, stream)


def test_destroying_a_graph_or_stream_at_work_is_a_fault() -> None:
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


def test_unfreed_objects_are_counted() -> None:
    gpu = Gpu(0)
    stream, event, memory = gpu.stream(), gpu.call("cuEventCreate", 0), gpu.call("cuMemAlloc", SIZE)
    assert gpu.device.left() == {"device memory": 1, "Stream": 1, "Event": 1}
    gpu.call("cuStreamDestroy", stream)
    gpu.call("cuEventDestroy", event)
    gpu.call("cuMemFree", memory)
    assert gpu.device.left() == {}
    with pytest.raises(BackendError, match="invalid_handle"):
        gpu.call("cuEventRecord", event, 1)
