"""CUDA graphs: captured, checked, replayed, and switched off if they would be wrong."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from fakes.machine import HIDDEN, Machine, MachineMaker, new_batch
from fakes.simulated_device import Code
from hdruntime.backends.tensorrt.graph_policy import GraphMode, GraphPolicy, same_answers
from hdruntime.errors import BackendError, InputError
from support.comparators import named_case

ENQUEUE_BOUND_MS = 0.0
GPU_BOUND_MS = 1e6


def launches(machine: Machine) -> int:
    return machine.device.calls.count("cuGraphLaunch")


def run_times(machine: Machine, runner: Any, times: int, tokens: int = 20) -> list[int]:
    """Launches of graphs for each of several batches of one shape."""
    taken = []
    for seed in range(times):
        before = launches(machine)
        machine.run(runner, new_batch(2, tokens, seed=seed))
        taken.append(launches(machine) - before)
    return taken


def test_shapes_are_captured_by_mode_and_time(new_machine: MachineMaker) -> None:
    for graphs, gpu_ms, expected in [
        # The captured batch is checked by a replay, and then replayed for its results.
        ("auto", ENQUEUE_BOUND_MS, [0, 0, 2, 1, 1]),
        ("auto", GPU_BOUND_MS, [0, 0, 0, 0, 0]),
        ("on", GPU_BOUND_MS, [0, 2, 1, 1, 1]),
        ("off", ENQUEUE_BOUND_MS, [0, 0, 0, 0, 0]),
    ]:
        with named_case(graphs, gpu_ms, expected):
            machine = new_machine()
            machine.device.elapsed_ms = gpu_ms
            assert run_times(machine, machine.runner(graphs=graphs), 5) == expected


def test_graphs_give_every_batch_its_own_results(new_machine: MachineMaker) -> None:
    for seed in range(4):
        with named_case(seed):
            machine = new_machine(seed)
            runner = machine.runner(graphs="on", max_graphs=3)
            lengths = np.random.default_rng(seed).choice([1, 20, 33, 60, 100, 200], 40)
            kinds = ("right", "left", "holes")
            batches = (new_batch(1 + n % 2, int(tokens), kinds[n % 3], seed=n) for n, tokens in enumerate(lengths))
            machine.in_flight(runner, batches)
            assert launches(machine) > 0


def test_the_least_recently_used_graph_is_dropped(machine: Machine) -> None:
    runner = machine.runner(graphs="on", max_graphs=2)
    run_times(machine, runner, 1, tokens=200)  # the scratch memory stays where it is from here on
    for tokens in (10, 20, 60):
        run_times(machine, runner, 2, tokens=tokens)
    # Two contexts of profiles, two of graphs.
    assert len(machine.trt.living) == 4
    assert run_times(machine, runner, 1, tokens=20) == [1]
    assert run_times(machine, runner, 1, tokens=60) == [1]
    assert run_times(machine, runner, 1, tokens=10) == [2]
    assert run_times(machine, runner, 1, tokens=60) == [1]
    assert run_times(machine, runner, 1, tokens=20) == [2]


def test_a_graph_outlives_other_shapes_but_not_the_scratch_memory(machine: Machine) -> None:
    runner = machine.runner(graphs="on")
    run_times(machine, runner, 2, tokens=10)
    machine.run(runner, new_batch(1, 30))
    assert run_times(machine, runner, 1, tokens=10) == [1]
    frees = machine.device.calls.count("cuMemFree")
    machine.run(runner, new_batch(8, 32))  # 16 KiB of scratch: still in the first block
    assert run_times(machine, runner, 1, tokens=10) == [1]
    machine.trt.scratch_bytes = 4096
    machine.run(runner, new_batch(4, 200))
    assert machine.device.calls.count("cuMemFree") > frees
    assert run_times(machine, runner, 3, tokens=10) == [2, 1, 1]


def test_a_replay_that_differs_switches_graphs_off_with_a_warning(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    runner = machine.runner(graphs="on")
    assert run_times(machine, runner, 3, tokens=200) == [0, 2, 1]
    machine.run(runner, new_batch(2, 20))
    machine.device.wrong_replays = True
    machine.run(runner, new_batch(2, 20, seed=1))
    assert "CUDA graphs are off from here on: for ShapeChoice" in caplog.text
    assert "the output last_hidden_state of a graph differs from a run without one" in caplog.text
    machine.device.wrong_replays = False
    assert run_times(machine, runner, 3) == [0] * 3
    assert run_times(machine, runner, 3, tokens=60) == [0] * 3
    assert run_times(machine, runner, 1, tokens=200) == [0], "earlier graphs are off, too"
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


@pytest.mark.parametrize("call", ["cuStreamBeginCapture", "cuGraphInstantiate", "enqueue"])
def test_a_capture_that_fails_switches_graphs_off_and_leaves_the_stream_usable(
    call: str, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    runner = machine.runner(graphs="on")
    in_flight = new_batch(2, 60)
    results = runner.start(in_flight, [HIDDEN])
    machine.run(runner, new_batch(2, 20))
    if call == "enqueue":
        machine.trt.trouble["capture"] = "operation not permitted"
    else:
        machine.device.failing[call] = Code.STREAM_CAPTURE_UNSUPPORTED
    machine.run(runner, new_batch(2, 20, seed=1))
    machine.device.failing.clear()
    assert "CUDA graphs are off from here on: a batch cannot be captured" in caplog.text
    machine.check(in_flight, results())
    assert run_times(machine, runner, 3) == [0] * 3


def test_a_driver_that_fails_while_a_graph_is_checked_leaves_nothing_behind(machine: Machine) -> None:
    runner = machine.runner(graphs="on")
    for tokens in (200, 20):
        machine.run(runner, new_batch(2, tokens))
    before = machine.device.left()
    machine.device.failing["cuMemsetD8Async"] = Code.INVALID_VALUE
    with pytest.raises(BackendError, match="CUDA error 1 at cuMemsetD8Async"):
        machine.run(runner, new_batch(2, 20, seed=1))
    machine.device.failing.clear()
    assert machine.device.left() == before
    assert run_times(machine, runner, 2) == [2, 1]


def test_a_graph_is_not_freed_while_it_runs(new_machine: MachineMaker) -> None:
    machine = new_machine(eagerness=0)
    runner = machine.runner(graphs="on")
    run_times(machine, runner, 2)
    batch = new_batch(2, 20, seed=9)
    results = runner.start(batch, [HIDDEN])
    with runner._device.current():
        runner._model._drop_graphs()
    machine.check(batch, results())


def test_memory_too_short_for_a_graph_leaves_the_shape_without_one(machine: Machine) -> None:
    runner = machine.runner(graphs="on")
    machine.run(runner, new_batch(2, 20))
    machine.run(runner, new_batch(2, 20))
    for tokens in (200, 60):
        machine.run(runner, new_batch(2, tokens))
    machine.run(runner, new_batch(2, 200))
    machine.device.free_bytes = 0
    assert run_times(machine, runner, 3, tokens=60) == [0] * 3
    machine.device.free_bytes = None
    assert run_times(machine, runner, 2, tokens=60) == [0, 0]
    assert run_times(machine, runner, 1, tokens=20)[0] >= 1


def test_tensorrt_rtx_uses_graphs_if_kernels_stay(new_machine: MachineMaker) -> None:
    for specialization in ["eager", "none"]:
        with named_case(specialization):
            machine = new_machine(variant="tensorrt_rtx")
            runner = machine.runner(graphs="on", kernel_specialization=specialization)
            assert run_times(machine, runner, 3) == [0, 2, 1]


def test_tensorrt_rtx_uses_no_graphs_if_kernels_are_replaced(
    new_machine: MachineMaker, caplog: pytest.LogCaptureFixture
) -> None:
    machine = new_machine(variant="tensorrt_rtx")
    machine.device.elapsed_ms = ENQUEUE_BOUND_MS
    with caplog.at_level(logging.INFO):
        assert run_times(machine, machine.runner(), 4) == [0] * 4
    assert "no CUDA graphs: TensorRT-RTX specialises kernels lazily" in caplog.text
    with pytest.raises(InputError, match="graphs='on' needs kernel_specialization='eager' or 'none'"):
        machine.runner(graphs="on")


def test_an_engine_of_tensorrt_rtx_that_cannot_be_captured_is_not(
    new_machine: MachineMaker, caplog: pytest.LogCaptureFixture
) -> None:
    machine = new_machine(variant="tensorrt_rtx")
    machine.trt.trouble["uncapturable"] = "yes"
    runner = machine.runner(graphs="on", kernel_specialization="eager")
    assert run_times(machine, runner, 4) == [0] * 4
    assert "TensorRT-RTX cannot be captured with this engine" in caplog.text
    assert "cuStreamBeginCapture" not in machine.device.calls


def test_the_second_run_decides_on_a_graph() -> None:
    policy = GraphPolicy(GraphMode.AUTO)
    for shape, times in {"bound": [(9, 99), (1.0, 1.4)], "busy": [(9, 9), (1.0, 1.6)]}.items():
        assert not policy.wants(shape)
        for enqueue_ms, gpu_ms in times:
            assert not policy.wants(shape)
            policy.ran(shape, enqueue_ms=enqueue_ms, gpu_ms=gpu_ms)
    assert policy.wants("bound")
    assert not policy.wants("busy")
    policy.ran("busy", enqueue_ms=9, gpu_ms=9)
    assert not policy.wants("busy")


def test_a_policy_remembers_a_bounded_number_of_shapes() -> None:
    policy = GraphPolicy(GraphMode.AUTO)
    for shape in range(10_000):
        for _ in range(2):
            policy.ran(shape, enqueue_ms=1, gpu_ms=0)
    assert policy.wants(9_999)
    assert not policy.wants(0)
    assert sum(policy.wants(shape) for shape in range(10_000)) == 4096


VALUES = np.array([[1.0, -200.0, np.nan], [np.inf, 3.0, 0.0]], np.float32)


def test_rounded_answers_are_the_same_and_others_differ() -> None:
    assert same_answers(VALUES, VALUES.copy())
    assert same_answers(VALUES, VALUES + np.float32(3.0))
    for other in (np.full((2, 3), np.nan), VALUES + 4, np.abs(VALUES)):
        assert not same_answers(VALUES, other.astype(np.float32))
        assert not same_answers(other.astype(np.float32), VALUES)
    assert not same_answers(np.array([np.inf, 1.0]), np.array([-np.inf, 1.0]))
