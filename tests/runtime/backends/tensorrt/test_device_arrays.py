"""Arrays that are on the GPU already, in and out, without a copy through the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fakes.arrays_on_gpu import ByDlpack, ByInterface, current
from fakes.simulated_device import Code
from hdruntime.bundle.manifest import PaddingRule, ProfileShape
from hdruntime.errors import BackendError, InputError, OutOfMemoryError
from hdruntime.gpu.dlpack import CPU, CUDA, DlTensor, capsule_of, open_capsule
from hdruntime.session import Session

HIDDEN = "last_hidden_state"

Batches = Callable[..., dict[str, np.ndarray]]


Arrays = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", [ByDlpack, ByInterface])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("engine_type", ["INT64", "INT32"])
def test_arrays_on_the_gpu_give_the_models_answers_there(
    engine_type: str, dtype: type, kind: type, seed: int, new_machine: Any, new_batch: Batches, on_gpu: Arrays
) -> None:
    machine = new_machine(seed, input_type=engine_type)
    runner = machine.runner()
    results = []
    for number, (rows, tokens) in enumerate([(1, 1), (3, 20), (2, 32), (1, 40), (4, 200), (3, 20)]):
        batch = new_batch(rows, tokens, ("right", "left", "holes", "all")[number % 4], seed=number)
        results.append((batch, runner.start_on_device(on_gpu(machine, batch, kind, dtype), [HIDDEN])))
    for batch, arrays in results:
        assert arrays[HIDDEN].shape == (*batch["input_ids"].shape, 4)
        machine.check(batch, {HIDDEN: arrays[HIDDEN].to_numpy()})
    del arrays, results


@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_where_padding_changes_answers_a_batch_on_the_gpu_is_answered_as_it_is_given(
    padding: str, new_machine: Any, new_batch: Batches, on_gpu: Arrays
) -> None:
    rule = PaddingRule(multiple_of=20, free_up_to=40)
    machine = new_machine(profiles=(ProfileShape(batch=(1, 1, 4), tokens=(1, 200, 200)),), padding=rule)
    session = Session(machine.bundle, machine.runner())
    for tokens in (17, 41, 60, 61):
        batch = new_batch(3, tokens, padding)
        machine.check(batch, {HIDDEN: session.run_on_device(**on_gpu(machine, batch, ByDlpack))[HIDDEN].to_numpy()})


@pytest.mark.parametrize("seed", range(8))
def test_a_slot_is_not_filled_again_before_its_batch_is_computed(
    seed: int, new_machine: Any, new_batch: Batches, on_gpu: Arrays
) -> None:
    machine = new_machine(seed, eagerness=0)
    runner = machine.runner(graphs="off")
    batches = [new_batch(2, 20, seed=number) for number in range(12)]
    given = [on_gpu(machine, batch, ByDlpack) for batch in batches]
    results = [runner.start_on_device(arrays, [HIDDEN]) for arrays in given]
    for batch, arrays in zip(batches, results, strict=True):
        machine.check(batch, {HIDDEN: arrays[HIDDEN].to_numpy()})
    del results, arrays


@pytest.mark.parametrize("seed", range(4))
def test_graphs_serve_arrays_on_the_gpu(seed: int, new_machine: Any, new_batch: Batches, on_gpu: Arrays) -> None:
    machine = new_machine(seed)
    runner = machine.runner(graphs="on")
    for number in range(5):
        batch = new_batch(2, 20, seed=number)
        results = runner.start_on_device(on_gpu(machine, batch, ByDlpack), [HIDDEN])
        # Another batch goes over the slots before the results are looked at.
        other = new_batch(2, 20, seed=100 + number)
        machine.run(runner, other)
        machine.check(batch, {HIDDEN: results[HIDDEN].to_numpy()})
    assert machine.device.calls.count("cuGraphLaunch") >= 5
    del results


def test_a_second_machine_output_is_not_computed_into_memory_of_the_first(
    machine: Any, new_batch: Batches, on_gpu: Arrays
) -> None:
    runner = machine.runner()
    batches = [new_batch(2, 20, seed=seed) for seed in range(4)]
    results = [runner.start_on_device(on_gpu(machine, batch, ByInterface), [HIDDEN]) for batch in batches]
    for batch, arrays in zip(batches, results, strict=True):
        machine.check(batch, {HIDDEN: arrays[HIDDEN].to_numpy()})
    assert len({arrays[HIDDEN].address for arrays in results}) == 4
    del arrays, results


def test_only_wanted_outputs_are_made(new_machine: Any, new_batch: Batches, on_gpu: Arrays) -> None:
    machine = new_machine(task="sentence-similarity")
    batch = new_batch(3, 20)
    runner = machine.runner()
    results = runner.start_on_device(on_gpu(machine, batch, ByDlpack), ["sentence_embedding"])
    assert {name: array.shape for name, array in results.items()} == {"sentence_embedding": (3, 4)}
    there = runner.start(batch, ["sentence_embedding"])()["sentence_embedding"]
    np.testing.assert_array_equal(results["sentence_embedding"].to_numpy(), there)
    del results


def read_there(machine: Any, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """What a kernel of another library sees."""
    size = 4 * (1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)))
    raw = machine.device.bytes_at(address, size).copy().view(np.float32)
    return np.lib.stride_tricks.as_strided(raw, shape, tuple(4 * stride for stride in strides))


@pytest.mark.parametrize("seed", range(4))
def test_a_consumer_of_dlpack_sees_the_answers_on_its_stream(
    seed: int, new_machine: Any, new_batch: Batches, on_gpu: Arrays
) -> None:
    machine = new_machine(seed)
    batch = new_batch(3, 20)
    array = machine.runner().start_on_device(on_gpu(machine, batch, ByDlpack), [HIDDEN])[HIDDEN]
    assert array.__dlpack_device__() == (CUDA, 0)
    stream = machine.device.new_stream()
    seen: list[np.ndarray] = []
    with open_capsule(array.__dlpack__(stream=int(stream))) as tensor:
        assert (tensor.shape, tensor.dtype, tensor.device) == ((3, 20, 4), np.dtype(np.float32), (CUDA, 0))
        machine.device.later(
            stream, lambda: seen.append(read_there(machine, tensor.address, tensor.shape, tensor.strides))
        )
        with current(machine.device):
            machine.device.cuStreamSynchronize(stream)
            machine.device.cuStreamDestroy(stream)
    machine.check(batch, {HIDDEN: seen[0]})


@pytest.mark.parametrize("seed", range(4))
def test_a_consumer_of_the_array_interface_sees_the_answers_at_once(
    seed: int, new_machine: Any, new_batch: Batches, on_gpu: Arrays
) -> None:
    machine = new_machine(seed)
    batch = new_batch(3, 20)
    array = machine.runner().start_on_device(on_gpu(machine, batch, ByDlpack), [HIDDEN])[HIDDEN]
    interface = array.__cuda_array_interface__
    assert (interface["version"], interface["stream"], interface["typestr"]) == (3, None, "<f4")
    strides = tuple(stride // 4 for stride in interface["strides"])
    machine.check(batch, {HIDDEN: read_there(machine, interface["data"][0], interface["shape"], strides)})


def test_streams_and_places_that_dlpack_does_not_have_are_refused(
    machine: Any, new_batch: Batches, on_gpu: Arrays
) -> None:
    array = machine.runner().start_on_device(on_gpu(machine, new_batch(1, 9), ByDlpack), [HIDDEN])[HIDDEN]
    for stream in (0, -2):
        with pytest.raises(InputError, match=f"stream is {stream}; DLPack has -1, 1, 2"):
            array.__dlpack__(stream=stream)
    for options in ({"dl_device": (CPU, 0)}, {"copy": True}):
        with pytest.raises(BufferError, match="not copied"):
            array.__dlpack__(**options)
    for options in ({}, {"stream": -1}, {"stream": 1}, {"dl_device": (CUDA, 0), "max_version": (1, 0), "copy": False}):
        array.__dlpack__(**options)


def test_an_array_outlives_its_session_and_its_memory_goes_with_it(
    machine: Any, new_batch: Batches, on_gpu: Arrays
) -> None:
    runner = machine.runner()
    batch = new_batch(2, 20)
    array = runner.start_on_device(on_gpu(machine, batch, ByDlpack), [HIDDEN])[HIDDEN]
    capsule = array.__dlpack__(stream=1)
    runner.close()
    machine.check(batch, {HIDDEN: array.to_numpy()})
    del array
    blocks = machine.device.left()["device memory"]
    del capsule
    assert machine.device.left().get("device memory", 0) == blocks - 1


def test_memory_that_is_let_go_while_a_graph_is_captured_is_freed_afterwards(
    machine: Any, new_batch: Batches, on_gpu: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = machine.runner(graphs="on")
    machine.run(runner, new_batch(2, 20))
    held = [runner.start_on_device(on_gpu(machine, new_batch(2, 60), ByDlpack), [HIDDEN])]
    end_capture = machine.device.cuStreamEndCapture

    def collect_first(stream: int) -> Any:
        held.clear()
        return end_capture(stream)

    monkeypatch.setattr(machine.device, "cuStreamEndCapture", collect_first)
    machine.run(runner, new_batch(2, 20))
    assert held == []
    assert not runner._batches._policy.off
    machine.run(runner, new_batch(2, 20))


class Strided(ByDlpack):
    def __dlpack__(self, *, stream: int) -> Any:
        shape = (self.values.shape[0], self.values.shape[1] // 2)
        tensor = DlTensor(
            address=self.address,
            shape=shape,
            strides=(self.values.shape[1], 2),
            dtype=self.values.dtype,
            device=self.place,
        )
        return capsule_of(tensor, self)


class Fleeting:
    """An array whose memory goes with the consumer's last reference to it."""

    def __init__(self, machine: Any, values: np.ndarray) -> None:
        self.array: ByDlpack | None = ByDlpack(machine, values)
        weakref.finalize(self.array, machine.device.forget, self.array.address)

    def __dlpack_device__(self) -> tuple[int, int]:
        return ByDlpack.place

    def __dlpack__(self, *, stream: int) -> Any:
        array, self.array = self.array, None
        assert array is not None
        array._write()
        return array.__dlpack__(stream=stream)


@pytest.mark.parametrize("seed", range(4))
def test_inputs_are_not_let_go_while_they_are_copied_though_the_batch_fails(
    seed: int, new_machine: Any, new_batch: Batches
) -> None:
    machine = new_machine(seed, eagerness=0)
    runner = machine.runner()
    arrays = {name: Fleeting(machine, values) for name, values in new_batch(2, 20).items()}
    streams = [array.array.stream for array in arrays.values() if array.array]
    for stream in streams:
        machine.device._objects[int(stream)].queue.clear()
    machine.device.failing["cuMemcpyDtoHAsync"] = Code.INVALID_VALUE
    with pytest.raises(BackendError, match="cuMemcpyDtoHAsync") as raised:
        runner.start_on_device(arrays, [HIDDEN])
    machine.device.failing.clear()
    del raised
    with current(machine.device):
        for stream in streams:
            machine.device.cuStreamDestroy(stream)


class OnCpu(ByDlpack):
    place = (CPU, 0)


class OnOtherGpu(ByDlpack):
    place = (CUDA, 1)


@pytest.mark.parametrize(
    ("kind", "dtype", "message"),
    [
        (Strided, np.int64, r"input_ids is not contiguous \(strides \[20, 2\]\); copy it"),
        (OnCpu, np.int64, "input_ids is not in the memory of a GPU; the engine is on GPU 0"),
        (OnOtherGpu, np.int64, "input_ids is on the GPU 1; the engine is on GPU 0"),
        (ByDlpack, np.float32, "input_ids is of type float32; on the GPU it must be int64 or int32"),
        (ByInterface, np.uint8, "input_ids is of type uint8; on the GPU it must be int64 or int32"),
    ],
)
def test_an_array_that_does_not_fit_is_refused_by_name(
    kind: type, dtype: type, message: str, machine: Any, new_batch: Batches, on_gpu: Arrays
) -> None:
    runner = machine.runner()
    arrays = on_gpu(machine, new_batch(2, 20), kind, dtype)
    with pytest.raises(InputError, match=message):
        runner.start_on_device(arrays, [HIDDEN])
    batch = new_batch(2, 20)
    good = runner.start_on_device(on_gpu(machine, batch, ByDlpack), [HIDDEN])
    machine.check(batch, {HIDDEN: good[HIDDEN].to_numpy()})
    del good


def test_inputs_that_are_missing_no_arrays_or_of_different_shapes_are_refused(
    machine: Any, new_batch: Batches, on_gpu: Arrays
) -> None:
    runner = machine.runner()
    arrays = on_gpu(machine, new_batch(2, 20), ByDlpack)
    with pytest.raises(InputError, match=r"There are the inputs \['input_ids'\]; this engine wants all of input_ids, "):
        runner.start_on_device({"input_ids": arrays["input_ids"]}, [HIDDEN])
    with pytest.raises(InputError, match="attention_mask is a list; it must be an array on the GPU"):
        runner.start_on_device({**arrays, "attention_mask": [[1]]}, [HIDDEN])
    with pytest.raises(InputError, match="attention_mask is not in the memory of a GPU"):
        runner.start_on_device({**arrays, "attention_mask": np.ones((2, 20), np.int64)}, [HIDDEN])
    shorter = on_gpu(machine, new_batch(2, 19), ByDlpack)
    with pytest.raises(InputError, match=r"shapes .*\(2, 20\).*\(2, 19\).*; they must be equal"):
        runner.start_on_device({**arrays, "attention_mask": shorter["attention_mask"]}, [HIDDEN])
    with pytest.raises(InputError, match="201 tokens; this engine accepts 1 to 200"):
        runner.start_on_device(on_gpu(machine, new_batch(1, 201), ByDlpack), [HIDDEN])
    flat = {name: ByInterface(machine, np.ones(5, np.int64)) for name in arrays}
    with pytest.raises(InputError, match=r"input_ids has shape \[5\]; it must be \[batch, tokens\]"):
        runner.start_on_device(flat, [HIDDEN])
    with current(machine.device):
        machine.device.cuCtxSynchronize()
        for array in flat.values():
            array.free()


@pytest.mark.parametrize("number", range(4))
def test_memory_too_short_for_results_is_told_and_nothing_is_lost(
    number: int, machine: Any, new_batch: Batches, on_gpu: Arrays
) -> None:
    runner = machine.runner()
    batch = new_batch(4, 200)
    arrays = on_gpu(machine, batch, ByDlpack)
    machine.device.free_bytes = (1_000, 30_000, 60_000, 75_000)[number]
    with pytest.raises(OutOfMemoryError):
        runner.start_on_device(arrays, [HIDDEN])
    machine.device.free_bytes = None
    results = runner.start_on_device(arrays, [HIDDEN])
    machine.check(batch, {HIDDEN: results[HIDDEN].to_numpy()})
    del results


def test_a_refusal_on_the_way_is_told_and_the_next_batch_runs(machine: Any, new_batch: Batches, on_gpu: Arrays) -> None:
    runner = machine.runner()
    batch = new_batch(2, 20)
    for call in ("cuMemcpy2DAsync", "cuMemsetD8Async", "cuEventCreate"):
        machine.device.failing[call] = Code.INVALID_VALUE
        arrays = on_gpu(machine, batch, ByDlpack if call != "cuEventCreate" else ByInterface)
        with pytest.raises(BackendError, match=f"CUDA error 1 at {call}"):
            runner.start_on_device(arrays, [HIDDEN])
        machine.device.failing.clear()
    machine.run(runner, batch)


def test_a_session_runs_arrays_on_the_gpu(machine: Any, new_batch: Batches, on_gpu: Arrays) -> None:
    session = Session(machine.bundle, machine.runner())
    batch = new_batch(3, 40)
    results = session.run_on_device(outputs=[HIDDEN], **on_gpu(machine, batch, ByDlpack))
    assert list(results) == [HIDDEN]
    machine.check(batch, {HIDDEN: results[HIDDEN].to_numpy()})
    with pytest.raises(InputError, match=r"No output 'logits'"):
        session.run_on_device(outputs=["logits"], **on_gpu(machine, batch, ByDlpack))
    session.close()
    with pytest.raises(BackendError, match="The session is closed"):
        session.run_on_device(**on_gpu(machine, batch, ByDlpack))
