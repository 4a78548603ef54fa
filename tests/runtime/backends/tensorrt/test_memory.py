"""Memory of the GPU: blocks that grow, and what happens when there is none left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hdruntime.bundle.manifest import ProfileShape
from hdruntime.errors import BackendError, OutOfMemoryError
from hdruntime.session import Session

HIDDEN = "last_hidden_state"

Batches = Callable[..., dict[str, np.ndarray]]


@pytest.mark.parametrize("where", ["free_bytes", "free_pinned_bytes"])
def test_a_batch_that_does_not_fit_is_told_and_smaller_ones_run(where: str, machine: Any, new_batch: Batches) -> None:
    runner = machine.runner(graphs="off")
    small, large = new_batch(2, 20), new_batch(4, 200)
    machine.trt.scratch_bytes = 1000
    # The small one takes 64 KB of scratch memory and 1 KB for its inputs, the large one 800 KB and 13 KB.
    setattr(machine.device, where, 300_000 if where == "free_bytes" else 5_000)
    machine.run(runner, small)
    with pytest.raises(OutOfMemoryError, match=r"too little free memory(.|\n)*--batch-tokens, in Python"):
        runner.start(large, [HIDDEN])
    setattr(machine.device, where, None)
    machine.run(runner, small)
    machine.run(runner, large)


def test_a_batch_in_flight_survives_another_that_does_not_fit(machine: Any, new_batch: Batches) -> None:
    runner = machine.runner(graphs="off")
    machine.trt.scratch_bytes = 1000
    machine.device.free_bytes = 400_000
    batch = new_batch(2, 20)
    results = runner.start(batch, [HIDDEN])
    with pytest.raises(OutOfMemoryError):
        runner.start(new_batch(4, 200), [HIDDEN])
    machine.check(batch, results())
    for seed in range(3):
        machine.run(runner, new_batch(2, 20, seed=seed))


def test_what_earlier_batches_left_is_given_back_before_memory_is_short(machine: Any, new_batch: Batches) -> None:
    runner = machine.runner(graphs="on")
    machine.trt.scratch_bytes = 100
    for tokens in (200, 100, 200, 100, 200):
        machine.run(runner, new_batch(4, tokens))
    assert machine.device.calls.count("cuGraphInstantiate") > 0
    held = sum(map(len, machine.device._memory.values()))
    # No more is to be had, but what all of it takes would do for more scratch memory.
    machine.device.free_bytes = 0
    machine.trt.scratch_bytes = (held - 200_000) // (3 * 200)
    assert machine.trt.scratch_bytes * 600 > 100 * 800 + 131_072, "two buffers more than scratch memory has"
    machine.run(runner, new_batch(3, 200))


def test_memory_of_a_batch_that_failed_is_not_given_back_while_it_is_copied_to(
    new_machine: Any, new_batch: Batches
) -> None:
    machine = new_machine(eagerness=0, profiles=[ProfileShape(batch=(1, 1, 8), tokens=(1, 4096, 4096))], max_len=4096)
    runner = machine.runner(graphs="off")
    for _ in range(2):
        machine.run(runner, new_batch(1, 10))
    machine.trt.trouble.enqueue = "the moon is full"
    for _ in range(2):
        with pytest.raises(BackendError, match="the moon is full"):
            runner.start(new_batch(1, 10), [HIDDEN])
    machine.trt.trouble.enqueue = None
    for _ in range(2):
        machine.run(runner, new_batch(8, 3000))


@pytest.mark.parametrize("trouble", ["context", "enqueue"])
def test_memory_that_tensorrt_lacks_is_memory(trouble: str, machine: Any, new_batch: Batches) -> None:
    runner = machine.runner()
    setattr(machine.trt.trouble, trouble, "[defaultAllocator.cpp] Error Code 1: Cuda Runtime (out of memory)")
    with pytest.raises(OutOfMemoryError, match=r"for want of memory: .*out of memory"):
        runner.start(new_batch(2, 20), [HIDDEN])
    setattr(machine.trt.trouble, trouble, None)
    machine.run(runner, new_batch(2, 20))


def test_a_block_that_fits_exactly_is_had_though_its_reserve_does_not_fit(machine: Any, new_batch: Batches) -> None:
    runner = machine.runner(graphs="off")
    machine.trt.scratch_bytes = 300
    # Inputs, outputs, and 240 000 bytes of scratch memory, which would be 245 760 with its reserve.
    machine.device.free_bytes = 65_536 + 65_536 + 240_000 + 1000
    machine.run(runner, new_batch(4, 200))


@pytest.mark.parametrize("seed", range(4))
def test_memory_that_comes_and_goes_never_makes_a_wrong_answer(seed: int, new_machine: Any, new_batch: Batches) -> None:
    machine = new_machine(seed)
    machine.trt.scratch_bytes = 3000
    runner = machine.runner(graphs="on", most_graphs=4)
    generator = np.random.default_rng(seed)
    refused = 0
    in_flight: list[tuple[Any, Any]] = []
    for number in range(60):
        machine.device.free_bytes = int(generator.choice([0, 100_000, 400_000, 1 << 30]))
        batch = new_batch(int(generator.integers(1, 5)), int(generator.choice([10, 30, 60, 150, 200])), seed=number)
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


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("call", ["cuMemAlloc", "cuMemHostAlloc"])
def test_whichever_allocation_fails_nothing_is_lost(call: str, number: int, machine: Any, new_batch: Batches) -> None:
    runner = machine.runner(graphs="on")
    machine.device.failing_after = (call, number)
    for seed in range(4):
        batch = new_batch(4, (20, 200)[seed // 2], seed=seed)
        try:
            machine.run(runner, batch)
        except BackendError:
            machine.run(runner, batch)
    assert machine.device.failing_after is None or number >= {"cuMemAlloc": 6, "cuMemHostAlloc": 4}[call]
    machine.device.failing_after = None


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_the_engine_says_what_its_weights_and_contexts_take(graphs: str, machine: Any, new_batch: Batches) -> None:
    machine.trt.scratch_bytes, machine.trt.weights_bytes = 1000, 5_000_000
    session = Session(machine.bundle, machine.runner(graphs=graphs))
    assert session.engine_bytes == 5_000_000
    taken = []
    for batch, tokens in ((2, 20), (4, 200), (2, 20)):
        session(**new_batch(batch, tokens, "none"))
        taken.append(session.engine_bytes)
    assert taken[0] < taken[1] == taken[2]
    # Scratch memory of the largest shape, and what a block that grows has to spare.
    assert 5_000_000 + 1000 * 4 * 200 <= taken[1] <= 5_000_000 + 1000 * 4 * 200 * 9 / 8 + 65_536
    session.close()
    with pytest.raises(BackendError, match="closed"):
        _ = session.engine_bytes


def test_a_tensorrt_that_does_not_tell_its_weights_gives_no_figure(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.trt, "EngineStat", None, raising=False)
    assert Session(machine.bundle, machine.runner()).engine_bytes is None
