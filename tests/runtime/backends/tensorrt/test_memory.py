"""Memory of the GPU: blocks that grow, and batches that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fakes.machine import HIDDEN, Machine, MachineMaker, new_batch
from hdruntime.bundle.manifest import ProfileShape
from hdruntime.errors import BackendError, OutOfMemoryError
from support.comparators import named_case


@pytest.mark.parametrize(("where", "limit"), [("free_bytes", 400_000), ("free_pinned_bytes", 5_000)])
def test_a_batch_that_does_not_fit_is_an_error_and_batches_in_flight_survive(
    where: str, limit: int, machine: Machine
) -> None:
    runner = machine.runner(graphs="off")
    small, large = new_batch(2, 20), new_batch(4, 200)
    machine.trt.scratch_bytes = 1000
    # The small one needs 64 KB of scratch memory and 1 KB for its inputs, the large one 800 KB and 13 KB.
    setattr(machine.device, where, limit)
    results = runner.start(small, [HIDDEN])
    with pytest.raises(OutOfMemoryError, match=r"too little free memory(.|\n)*lower batch_tokens"):
        runner.start(large, [HIDDEN])
    machine.check(small, results())
    for seed in range(3):
        machine.run(runner, new_batch(2, 20, seed=seed))
    setattr(machine.device, where, None)
    machine.run(runner, large)


def test_memory_of_earlier_batches_is_freed_before_memory_is_short(machine: Machine) -> None:
    runner = machine.runner(graphs="on")
    machine.trt.scratch_bytes = 100
    for tokens in (200, 100, 200, 100, 200):
        machine.run(runner, new_batch(4, tokens))
    assert machine.device.calls.count("cuGraphInstantiate") > 0
    held = sum(map(len, machine.device._memory.values()))
    # No memory is left, but all that is held would suffice for more scratch memory.
    machine.device.free_bytes = 0
    machine.trt.scratch_bytes = (held - 200_000) // (3 * 200)
    assert machine.trt.scratch_bytes * 600 > 100 * 800 + 131_072, "more than scratch memory and two buffers"
    machine.run(runner, new_batch(3, 200))


def test_memory_of_a_failed_batch_is_not_freed_during_its_copies(new_machine: MachineMaker) -> None:
    machine = new_machine(eagerness=0, profiles=[ProfileShape(batch=(1, 1, 8), tokens=(1, 4096, 4096))], max_len=4096)
    runner = machine.runner(graphs="off")
    for _ in range(2):
        machine.run(runner, new_batch(1, 10))
    machine.trt.trouble["enqueue"] = "the moon is full"
    for _ in range(2):
        with pytest.raises(BackendError, match="the moon is full"):
            runner.start(new_batch(1, 10), [HIDDEN])
    machine.trt.trouble.clear()
    for _ in range(2):
        machine.run(runner, new_batch(8, 3000))


def test_a_lack_of_memory_in_tensorrt_is_an_out_of_memory_error(new_machine: MachineMaker) -> None:
    for trouble in ["context", "profile", "size", "enqueue"]:
        with named_case(trouble):
            machine = new_machine()
            runner = machine.runner()
            machine.trt.trouble[trouble] = "[defaultAllocator.cpp] Error Code 1: Cuda Runtime (out of memory)"
            with pytest.raises(OutOfMemoryError, match=r"out of memory: .*Error Code 1: Cuda Runtime"):
                runner.start(new_batch(2, 20), [HIDDEN])
            machine.trt.trouble.clear()
            machine.run(runner, new_batch(2, 20))


def test_a_block_that_fits_exactly_is_allocated_without_its_reserve(machine: Machine) -> None:
    runner = machine.runner(graphs="off")
    machine.trt.scratch_bytes = 300
    # Inputs, outputs, and 240 000 bytes of scratch memory, which would be 245 760 with its reserve.
    machine.device.free_bytes = 65_536 + 65_536 + 240_000 + 1000
    machine.run(runner, new_batch(4, 200))


def test_memory_that_comes_and_goes_never_gives_a_wrong_answer(new_machine: MachineMaker) -> None:
    for seed in range(4):
        with named_case(seed):
            machine = new_machine(seed)
            machine.trt.scratch_bytes = 3000
            runner = machine.runner(graphs="on", max_graphs=4)
            generator = np.random.default_rng(seed)
            refused = 0
            in_flight: list[tuple[Any, Any]] = []
            for number in range(60):
                machine.device.free_bytes = int(generator.choice([0, 100_000, 400_000, 1 << 30]))
                batch = new_batch(
                    int(generator.integers(1, 5)), int(generator.choice([10, 30, 60, 150, 200])), seed=number
                )
                try:
                    in_flight.append((batch, runner.start(batch, [HIDDEN])))
                except OutOfMemoryError:
                    refused += 1
                if len(in_flight) == 2 or (in_flight and generator.random() < 0.3):
                    inputs, results = in_flight.pop(0)
                    machine.check(inputs, results())
            for inputs, results in in_flight:
                machine.check(inputs, results())
            assert 0 < refused < 50


def test_the_engine_reports_the_memory_of_its_weights_and_contexts(machine: Machine) -> None:
    machine.trt.scratch_bytes, machine.trt.weights_bytes = 1000, 5_000_000
    session = machine.session(graphs="on")
    assert session.engine_bytes == 5_000_000
    taken = []
    for batch, tokens in ((2, 20), (4, 200), (2, 20)):
        session(**new_batch(batch, tokens, "none"))
        taken.append(session.engine_bytes)
    assert taken[0] < taken[1] == taken[2]
    # Scratch memory of the largest shape, and the reserve of a block that grows.
    assert 5_000_000 + 1000 * 4 * 200 <= taken[1] <= 5_000_000 + 1000 * 4 * 200 * 9 / 8 + 65_536
    session.close()
    with pytest.raises(BackendError, match="closed"):
        _ = session.engine_bytes


def test_a_tensorrt_that_does_not_report_its_weights_gives_no_figure(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.trt, "EngineStat", None, raising=False)
    assert machine.session().engine_bytes is None
