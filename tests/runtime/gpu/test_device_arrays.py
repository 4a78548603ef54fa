"""Arrays that are already on the GPU, in and out, without a copy through the CPU."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from fakes.machine import HIDDEN, ByDlpack, ByInterface, Machine, MachineMaker, new_batch, on_engines
from fakes.simulated_device import Code, SimulatedDevice
from hdruntime.bundle.manifest import PaddingRule, ProfileShape
from hdruntime.errors import BackendError, InputError, OutOfMemoryError
from hdruntime.gpu.dlpack import CPU, CUDA, DlTensor, open_capsule
from support.comparators import named_case


@pytest.mark.parametrize(
    ("seed", "engine_type", "dtype", "kind"),
    [
        (0, "INT64", np.int64, ByDlpack),
        (1, "INT64", np.int32, ByInterface),
        (2, "INT32", np.int64, ByInterface),
        (3, "INT32", np.int32, ByDlpack),
    ],
)
def test_arrays_on_the_gpu_give_the_models_answers_there(
    engine_type: str, dtype: type, kind: type, seed: int, new_machine: MachineMaker
) -> None:
    machine = new_machine(seed, input_type=engine_type)
    runner = machine.runner()
    results = []
    for number, (rows, tokens) in enumerate([(1, 1), (3, 20), (2, 32), (1, 40), (4, 200), (3, 20)]):
        batch = new_batch(rows, tokens, ("right", "left", "holes", "all")[number % 4], seed=number)
        results.append((batch, machine.start_on_device(runner, batch, kind, dtype)))
    for batch, arrays in results:
        assert arrays[HIDDEN].shape == (*batch["input_ids"].shape, 4)
        machine.check(batch, arrays)


def test_integers_of_another_width_are_as_few_calls_for_many_rows_as_for_one(new_machine: MachineMaker) -> None:
    machine = new_machine(input_type="INT64")
    runner = machine.runner(graphs="off")
    calls = []
    for rows in (2, 2, 4):  # the first has a context to make
        arrays = machine.on_gpu(new_batch(rows, 128, "none"), ByDlpack, np.int32)
        machine.device.calls.clear()
        runner.start_on_device(arrays, [HIDDEN])
        calls.append([call for call in machine.device.calls if "emcpy" in call])
    assert calls[1] == calls[2] == [*["cuMemcpyDtoH"] * 2, "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync"]


def test_where_padding_changes_answers_a_batch_on_the_gpu_is_answered_as_given(new_machine: MachineMaker) -> None:
    for padding in ["none", "right", "left"]:
        with named_case(padding):
            rule = PaddingRule(multiple_of=20, free_up_to=40)
            machine = new_machine(profiles=(ProfileShape(batch=(1, 1, 4), tokens=(1, 200, 200)),), padding=rule)
            session = machine.session()
            for tokens in (17, 41, 60, 61):
                batch = new_batch(3, tokens, padding)
                machine.check(batch, session.run_on_device(**machine.on_gpu(batch)))


def test_a_slot_is_not_filled_again_before_its_batch_is_computed(new_machine: MachineMaker) -> None:
    for seed in range(4):
        with named_case(seed):
            machine = new_machine(seed, eagerness=0)
            runner = machine.runner(graphs="off")
            batches = [new_batch(2, 20, seed=number) for number in range(12)]
            given = [machine.on_gpu(batch) for batch in batches]
            results = [runner.start_on_device(arrays, [HIDDEN]) for arrays in given]
            for batch, arrays in zip(batches, results, strict=True):
                machine.check(batch, arrays)


@on_engines
def test_graphs_serve_arrays_on_the_gpu(new_machine: MachineMaker) -> None:
    for seed in range(4):
        with named_case(seed):
            machine = new_machine(seed)
            runner = machine.runner(graphs="on")
            for number in range(5):
                batch = new_batch(2, 20, seed=number)
                results = machine.start_on_device(runner, batch)
                # Another batch uses the slots before the results are read.
                machine.run(runner, new_batch(2, 20, seed=100 + number))
                machine.check(batch, results)
            assert machine.device.calls.count("cuGraphLaunch") >= 5


def read_there(machine: Machine, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """What a kernel of another library reads."""
    size = 4 * (1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)))
    raw = machine.device.bytes_at(address, size).copy().view(np.float32)
    return np.lib.stride_tricks.as_strided(raw, shape, tuple(4 * stride for stride in strides))


def test_a_consumer_of_dlpack_reads_the_answers_on_its_stream(new_machine: MachineMaker) -> None:
    for seed in range(4):
        with named_case(seed):
            machine = new_machine(seed)
            batch = new_batch(3, 20)
            array = machine.start_on_device(machine.runner(), batch)[HIDDEN]
            assert array.__dlpack_device__() == (CUDA, 0)
            stream = machine.device.new_stream()
            seen: list[np.ndarray] = []
            with open_capsule(array.__dlpack__(stream=int(stream))) as tensor:
                assert (tensor.shape, tensor.dtype, tensor.device) == ((3, 20, 4), np.dtype(np.float32), (CUDA, 0))
                read = functools.partial(read_there, machine, tensor.address, tensor.shape, tensor.strides)
                machine.device.later(stream, lambda read=read, seen=seen: seen.append(read()))
                with machine.device.as_current():
                    machine.device.cuStreamSynchronize(stream)
                    machine.device.cuStreamDestroy(stream)
            machine.check(batch, {HIDDEN: seen[0]})


def test_a_consumer_of_the_array_interface_reads_the_answers_at_once(new_machine: MachineMaker) -> None:
    for seed in range(4):
        with named_case(seed):
            machine = new_machine(seed)
            batch = new_batch(3, 20)
            array = machine.start_on_device(machine.runner(), batch)[HIDDEN]
            described = array.__cuda_array_interface__
            assert (described["version"], described["stream"], described["typestr"]) == (3, None, "<f4")
            strides = tuple(stride // 4 for stride in described["strides"])
            machine.check(batch, {HIDDEN: read_there(machine, described["data"][0], described["shape"], strides)})


def test_invalid_streams_and_other_devices_are_refused_by_dlpack(machine: Machine) -> None:
    array = machine.start_on_device(machine.runner(), new_batch(1, 9))[HIDDEN]
    for stream in (0, -2):
        with pytest.raises(InputError, match=f"stream is {stream}; give -1, 1, 2 or the handle"):
            array.__dlpack__(stream=stream)
    for options in ({"dl_device": (CPU, 0)}, {"copy": True}):
        with pytest.raises(BufferError, match="not copied"):
            array.__dlpack__(**options)
    for options in ({}, {"stream": -1}, {"stream": 1}, {"dl_device": (CUDA, 0), "max_version": (1, 0), "copy": False}):
        array.__dlpack__(**options)


def test_an_array_outlives_its_session_and_its_memory_is_freed_with_it(machine: Machine) -> None:
    runner = machine.runner()
    batch = new_batch(2, 20)
    array = machine.start_on_device(runner, batch)[HIDDEN]
    capsule = array.__dlpack__(stream=1)
    runner.close()
    machine.check(batch, {HIDDEN: array})
    del array
    blocks = machine.device.left()["device memory"]
    del capsule
    assert machine.device.left().get("device memory", 0) == blocks - 1


@on_engines
def test_memory_released_during_a_capture_is_freed_afterwards(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = machine.runner(graphs="on")
    machine.run(runner, new_batch(2, 20))
    held = [machine.start_on_device(runner, new_batch(2, 60))]
    end_capture = machine.device.cuStreamEndCapture

    def collect_first(stream: int) -> Any:
        held.clear()
        return end_capture(stream)

    monkeypatch.setattr(machine.device, "cuStreamEndCapture", collect_first)
    machine.run(runner, new_batch(2, 20))
    assert held == []
    assert runner._model._graphs, "the capture succeeded"
    machine.run(runner, new_batch(2, 20))


def test_memory_is_freed_after_the_last_of_several_captures(machine: Machine) -> None:
    """Whichever thread it is released in: freeing waits for the context, which breaks every capture."""
    device, freed = machine.runner()._device, []
    with device.capturing():
        with device.capturing():
            pass
        device.discard(lambda: freed.append("in the capturing thread"))
        thread = threading.Thread(target=device.discard, args=(lambda: freed.append("in another"),))
        thread.start()
        thread.join()
        assert freed == []
    with device.current():
        assert freed == ["in the capturing thread", "in another"]


class Fleeting:
    """An array whose memory is freed with the consumer's last reference to it."""

    def __init__(self, device: SimulatedDevice, values: np.ndarray) -> None:
        self.array: ByDlpack | None = ByDlpack(device, values)
        weakref.finalize(self.array, device.forget, self.array.address)

    def __dlpack_device__(self) -> tuple[int, int]:
        return ByDlpack.place

    def __dlpack__(self, *, stream: int) -> Any:
        array, self.array = self.array, None
        assert array is not None
        array.write()
        return array.__dlpack__(stream=stream)


def test_inputs_are_not_released_during_their_copy_even_if_the_batch_fails(new_machine: MachineMaker) -> None:
    machine = new_machine(eagerness=0)
    runner = machine.runner()
    arrays = {name: Fleeting(machine.device, values) for name, values in new_batch(2, 20).items()}
    streams = [array.array.stream for array in arrays.values() if array.array]
    for stream in streams:
        machine.device._objects[int(stream)].queue.clear()
    machine.device.failing["cuMemcpyDtoHAsync"] = Code.INVALID_VALUE
    with pytest.raises(BackendError, match="cuMemcpyDtoHAsync") as raised:
        runner.start_on_device(arrays, [HIDDEN])
    machine.device.failing.clear()
    del raised
    with machine.device.as_current():
        for stream in streams:
            machine.device.cuStreamDestroy(stream)


class OnCpu(ByDlpack):
    place = (CPU, 0)


class OnOtherGpu(ByDlpack):
    place = (CUDA, 1)


class Strided(ByDlpack):
    def described(self) -> DlTensor:
        rows, tokens = self.values.shape
        return super().described()._replace(shape=(rows, tokens // 2), strides=(tokens, 2))


def test_an_array_that_does_not_fit_is_refused_by_name(machine: Machine) -> None:
    for kind, dtype, message in [
        (Strided, np.int64, r"input_ids is not contiguous \(strides \[20, 2\]\); copy it"),
        (OnCpu, np.int64, "input_ids is not in the memory of a GPU; the session is on GPU 0"),
        (OnOtherGpu, np.int64, "input_ids is on the GPU 1; the session is on GPU 0"),
        (ByDlpack, np.float32, "input_ids is of type float32; on the GPU it must be int64 or int32"),
        (ByInterface, np.uint8, "input_ids is of type uint8; on the GPU it must be int64 or int32"),
    ]:
        with named_case(kind, dtype, message):
            runner = machine.runner()
            batch = new_batch(2, 20)
            with pytest.raises(InputError, match=message):
                machine.start_on_device(runner, batch, kind, dtype)
            machine.check(batch, machine.start_on_device(runner, batch))


def test_inputs_that_are_missing_not_arrays_or_of_different_shapes_are_refused(machine: Machine) -> None:
    runner = machine.runner()
    arrays, shorter = machine.on_gpu(new_batch(2, 20)), machine.on_gpu(new_batch(2, 19))
    flat = machine.on_gpu({name: np.ones(5, np.int64) for name in arrays}, ByInterface)
    for given, message in (
        ({"input_ids": arrays["input_ids"]}, r"The inputs are \['input_ids'\]; this bundle needs all of input_ids, "),
        ({**arrays, "attention_mask": [[1]]}, "attention_mask is a list; it must be an array on the GPU"),
        ({**arrays, "attention_mask": np.ones((2, 20), int)}, "attention_mask is not in the memory of a GPU"),
        (
            {**arrays, "attention_mask": shorter["attention_mask"]},
            r"shapes .*\(2, 20\).*\(2, 19\).*; they must be equal",
        ),
        (machine.on_gpu(new_batch(1, 513)), "513 tokens; this (engine|bundle) accepts 1 to (200|512)"),
        (flat, r"input_ids has shape \[5\]; it must be \[batch, tokens\]"),
    ):
        with pytest.raises(InputError, match=message):
            runner.start_on_device(given, [HIDDEN])


@pytest.mark.parametrize(
    ("new_machine", "sizes"),
    [("tensorrt", (1_000, 30_000, 60_000, 75_000)), ("onnxruntime", (1_000, 20_000))],
    indirect=["new_machine"],
)
def test_results_that_do_not_fit_in_memory_are_an_error_and_nothing_is_lost(
    machine: Machine, sizes: tuple[int, ...]
) -> None:
    for free_bytes in sizes:
        with named_case(free_bytes):
            runner = machine.runner()
            batch = new_batch(4, 200)
            arrays = machine.on_gpu(batch)
            machine.device.free_bytes = free_bytes
            with pytest.raises(OutOfMemoryError):
                runner.start_on_device(arrays, [HIDDEN])
            machine.device.free_bytes = None
            machine.check(batch, runner.start_on_device(arrays, [HIDDEN]))


def test_after_a_failed_call_of_the_driver_the_next_batch_runs(machine: Machine) -> None:
    runner = machine.runner()
    batch = new_batch(2, 20)
    for call in ("cuMemcpyDtoDAsync", "cuMemsetD8Async", "cuEventCreate"):
        machine.device.failing[call] = Code.INVALID_VALUE
        arrays = machine.on_gpu(batch, ByDlpack if call != "cuEventCreate" else ByInterface)
        with pytest.raises(BackendError, match=f"CUDA error 1 at {call}"):
            runner.start_on_device(arrays, [HIDDEN])
        machine.device.failing.clear()
    machine.run(runner, batch)


def test_a_session_runs_arrays_on_the_gpu(machine: Machine) -> None:
    session = machine.session()
    batch = new_batch(3, 40)
    results = session.run_on_device(outputs=[HIDDEN], **machine.on_gpu(batch))
    assert list(results) == [HIDDEN]
    machine.check(batch, results)
    with pytest.raises(InputError, match=r"no output 'logits'"):
        session.run_on_device(outputs=["logits"], **machine.on_gpu(batch))
    session.close()
    with pytest.raises(BackendError, match="The session is closed"):
        session.run_on_device(**machine.on_gpu(batch))
