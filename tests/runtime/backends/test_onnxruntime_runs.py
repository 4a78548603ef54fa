"""How ONNX Runtime's runs on a GPU are enqueued, and what they wait for, on a simulated GPU."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.machine import HIDDEN, Machine, MachineMaker, new_batch, new_machines
from fakes.simulated_onnxruntime import SimulatedSession
from hdruntime.backends.onnxruntime import cuda as onnxruntime_cuda
from hdruntime.errors import BackendError, OutOfMemoryError
from support.comparators import assert_close, named_case
from support.recurrent_bundle import make_streaming_bundle, streamed_states


@pytest.fixture
def new_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MachineMaker]:
    """See `new_machines`."""
    yield from new_machines(monkeypatch, tmp_path, "onnxruntime")


@pytest.fixture
def machine(new_machine: MachineMaker) -> Machine:
    """A machine without options."""
    return new_machine()


def queued(machine: Machine) -> int:
    """Operations that streams have not run yet."""
    return sum(len(stream.queue) for stream in machine.device._streams())


def test_only_requested_outputs_are_computed_into_memory_and_copied(new_machine: MachineMaker) -> None:
    machine = new_machine(task="sentence-similarity")
    runner = machine.runner()
    batch = new_batch(3, 20)
    runner.start(batch, ["sentence_embedding"])()
    sizes: list[int] = []
    copy = machine.device.cuMemcpyDtoHAsync
    machine.device.cuMemcpyDtoHAsync = lambda *copied: (sizes.append(copied[2]), copy(*copied))[1]
    runner.start(batch, ["sentence_embedding"])()
    runner.start(batch, [HIDDEN])()
    assert machine.trt.outputs_run == [["sentence_embedding"]] * 2 + [[HIDDEN]]
    assert sizes == [3 * 4 * 4, 3 * 20 * 4 * 4]


def test_answers_left_on_the_gpu_take_no_memory_in_slots(machine: Machine) -> None:
    runner = machine.runner()
    batch = new_batch(4, 200)
    machine.check(batch, machine.start_on_device(runner, batch))
    (used, other) = runner._pipeline.slots
    assert [used.inputs.size > 0, used.outputs.size, used.staged_outputs.size, other.inputs.size] == [True, 0, 0, 0]


@pytest.mark.parametrize("waits_inside", [False, True], ids=["nothing waits", "a condition is read"])
def test_a_run_is_enqueued_and_not_waited_for(waits_inside: bool, new_machine: MachineMaker) -> None:
    for seed in range(4):
        with named_case(seed):
            machine = new_machine(seed, eagerness=0)
            machine.trt.waits_inside = waits_inside
            runner = machine.runner()
            machine.run(runner, new_batch(2, 30))
            batches = [new_batch(2, 30, seed=number) for number in range(2)]
            started = [runner.start(batch, [HIDDEN]) for batch in batches]
            runner._thread.submit(lambda: None).result()  # the thread has enqueued both
            assert queued(machine) > 0
            for batch, results in zip(batches, started, strict=True):
                machine.check(batch, results())


def test_one_run_of_many_waits_so_that_pinned_memory_is_given_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime_cuda, "_RUNS_BETWEEN_WAITS", 8)
    runner = machine.runner()
    machine.in_flight(runner, (new_batch(1, 5, seed=number) for number in range(50)))
    assert machine.trt.waited_runs == 50 // 8
    assert machine.trt.most_held_buffers == machine.trt.held_buffers / (50 % 8) * 8


def test_inputs_that_the_cpu_reads_are_there_when_they_are_bound(new_machine: MachineMaker) -> None:
    for seed in range(4):
        with named_case(seed):
            machine = new_machine(seed, eagerness=0)
            machine.trt.bound_on_cpu = {"attention_mask"}
            runner = machine.runner()
            machine.in_flight(runner, (new_batch(2, 20, seed=number) for number in range(4)))
            batch = new_batch(2, 20)
            machine.check(batch, machine.start_on_device(runner, batch))


def test_inputs_that_are_bound_before_they_are_there_are_noticed(new_machine: MachineMaker) -> None:
    machine = new_machine(0, eagerness=0)
    machine.trt.bound_on_cpu = {"input_ids"}
    runner = machine.runner()
    machine.device.ignored.add("cuEventSynchronize")
    batch = new_batch(2, 20, "none")
    with pytest.raises(AssertionError):
        machine.check(batch, runner.start(batch, [HIDDEN])())
    machine.device.ignored.clear()
    machine.device.faults.clear()


def test_states_that_the_cpu_reads_are_those_of_the_segment_before(new_machine: MachineMaker) -> None:
    for seed in range(3):
        with named_case(seed):
            made_by = functools.partial(make_streaming_bundle, attended=False)
            machine = new_machine(seed, made_by=made_by, eagerness=0)
            machine.trt.bound_on_cpu = {"mems.mask", "mems.0"}
            ids = np.random.default_rng(seed).integers(0, 9, 90).tolist()
            segments = machine.session().stream_all([ids], segment=16)
            found = np.concatenate([segment.outputs[HIDDEN] for segment in segments])
            assert_close(found, streamed_states(ids, 16), atol=1e-5)


def test_starting_only_submits(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that waits for the GPU keeps nobody from preparing the next batch."""
    runner, go_on = machine.runner(), threading.Event()
    compute = runner._model.compute

    def waiting(*arguments: object) -> None:
        assert go_on.wait(timeout=60)
        compute(*arguments)

    monkeypatch.setattr(runner._model, "compute", waiting)
    batches = [new_batch(2, 20, seed=number) for number in range(2)]
    started = [runner.start(batch, [HIDDEN]) for batch in batches]
    assert machine.trt.outputs_run == []
    go_on.set()
    for batch, results in zip(batches, started, strict=True):
        machine.check(batch, results())


def test_batches_run_while_python_ends(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a function of `atexit`: threads take no work any more."""
    runner = machine.runner()
    machine.run(runner, new_batch(2, 20))
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    machine.in_flight(runner, (new_batch(2, 20, seed=number) for number in range(3)))


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        ("Non-zero status code returned", BackendError, r"failed on a batch of 2 x 30 tokens: Non-zero status"),
        (
            "CUDA failure 2: out of memory",
            OutOfMemoryError,
            r"got no memory for a batch of 2 x 30 tokens.*\n.*tokens",
        ),
        ("Available memory of 8 is smaller", OutOfMemoryError, r"no memory for a batch of 2 x 30 tokens"),
    ],
)
def test_a_failed_run_leaves_nothing_in_flight_and_the_next_batch_runs(
    said: str, kind: type[BackendError], message: str, machine: Machine
) -> None:
    runner = machine.runner()
    before = new_batch(2, 20)
    in_flight = runner.start(before, [HIDDEN])
    runner._thread.submit(lambda: None).result()  # it is enqueued
    machine.trt.trouble = said
    kept: list[BackendError] = []
    for fails in (
        lambda: runner.start(new_batch(2, 30), [HIDDEN])(),
        lambda: machine.start_on_device(runner, new_batch(2, 30)),
    ):
        with pytest.raises(kind, match=message) as raised:
            fails()
        assert type(raised.value) is kind
        assert queued(machine) == 0
        kept.append(raised.value)
        del raised
    machine.trt.trouble = None
    machine.check(before, in_flight())
    for seed in range(3):
        machine.run(runner, new_batch(2, 30, seed=seed))
    runner.close()
    assert machine.device.faults == [], "a kept error keeps no session, whose stream is gone"
    for error in kept:
        error.with_traceback(None)  # whose frames have the answers that were to be on the GPU


def test_a_lack_of_memory_in_a_run_is_tried_once_more_without_the_buffers_of_others(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = machine.runner()
    machine.run(runner, new_batch(4, 200))
    run, tried = SimulatedSession.run_with_iobinding, []

    def full_once(*arguments: Any) -> None:
        tried.append(machine.device.left()["device memory"])
        if len(tried) == 1:
            raise RuntimeError("Failed to allocate memory for requested buffer of size 9")
        run(*arguments)

    monkeypatch.setattr(SimulatedSession, "run_with_iobinding", full_once)
    machine.run(runner, new_batch(2, 20))
    assert tried[0] > tried[1]
