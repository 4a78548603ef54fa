"""Batches through the way that backends on a GPU share, on a simulated GPU: each library in turn."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fakes.machine import HIDDEN, Machine, MachineMaker, new_batch
from fakes.simulated_device import Code
from hdruntime.errors import BackendError
from support.comparators import named_case

SEEDS = range(6)


def test_batches_in_flight_do_not_touch_each_other(new_machine: MachineMaker) -> None:
    for seed in SEEDS:
        with named_case(seed):
            machine = new_machine(seed)
            runner = machine.runner()
            lengths = np.random.default_rng(seed).choice([1, 16, 30, 48, 100, 200], 24)
            machine.in_flight(runner, (new_batch(1 + n % 4, int(tokens), seed=n) for n, tokens in enumerate(lengths)))


def test_a_runner_that_does_not_wait_is_caught(new_machine: MachineMaker) -> None:
    for seed in SEEDS:
        for call in ["cuStreamWaitEvent", "cuEventSynchronize"]:
            with named_case(seed, call):
                machine = new_machine(seed, eagerness=0.3)
                runner = machine.runner(graphs="off")
                machine.device.ignored.add(call)
                wrong = 0
                for number in range(12):
                    batch = new_batch(2, 20, "none", seed=number)
                    results = runner.start(batch, [HIDDEN])
                    try:
                        machine.check(batch, results())
                    except (AssertionError, BackendError):
                        wrong += 1
                assert wrong
                machine.device.ignored.clear()
                machine.device.faults.clear()


def test_more_batches_than_slots_are_finished_to_make_room(new_machine: MachineMaker) -> None:
    for seed in SEEDS:
        with named_case(seed):
            machine = new_machine(seed)
            runner = machine.runner()
            batches = [new_batch(2, 20 + 30 * (number % 2), seed=number) for number in range(7)]
            started = [runner.start(batch, [HIDDEN]) for batch in batches]
            for batch, results in reversed(list(zip(batches, started, strict=True))):
                machine.check(batch, results())


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_threads_get_their_own_results(graphs: str, new_machine: MachineMaker) -> None:
    machine = new_machine(3)
    runner = machine.runner(graphs=graphs)

    def work(number: int) -> None:
        for turn in range(15):
            tokens = (17, 60, 200)[(turn + number) % 3]
            machine.run(runner, new_batch(1 + turn % 3, tokens, seed=100 * number + turn))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4), timeout=60)) == [None] * 4


def test_closing_during_work_gives_threads_results_or_the_reason(new_machine: MachineMaker) -> None:
    machine = new_machine(1)
    runner = machine.runner()
    begun = threading.Barrier(4)

    def work() -> None:
        begun.wait()
        for turn in range(200):
            machine.run(runner, new_batch(2, 20, seed=turn))

    with ThreadPoolExecutor(3) as pool:
        workers = [pool.submit(work) for _ in range(3)]
        begun.wait()
        runner.close()
        for worker in workers:
            with pytest.raises(BackendError, match=r"^The session is closed; load the bundle again\.$"):
                worker.result(timeout=60)


def test_requests_after_closing_raise(machine: Machine) -> None:
    runner = machine.runner()
    left = runner.start(new_batch(2, 20), [HIDDEN])
    runner.close()
    runner.close()
    for ask in (left, lambda: runner.start(new_batch(2, 20), [HIDDEN])(), lambda: runner.start_on_device({}, [])):
        with pytest.raises(BackendError, match="session is closed"):
            ask()
    assert machine.device.left() == {}
    assert not machine.trt.living


def test_buffers_are_reused(machine: Machine) -> None:
    runner = machine.runner(graphs="off")
    for _ in range(2):
        machine.run(runner, new_batch(4, 200))
    machine.device.calls.clear()
    for tokens in (200, 100, 3):
        machine.run(runner, new_batch(2, tokens))
    assert not {"cuMemAlloc", "cuMemHostAlloc", "cuMemFree", "cuMemFreeHost"} & set(machine.device.calls)


def test_only_requested_outputs_are_returned_and_token_types_are_passed(new_machine: MachineMaker) -> None:
    machine = new_machine(task="sentence-similarity", token_types=True)
    inputs = new_batch(3, 20)
    inputs["token_type_ids"] = inputs["input_ids"] % 2
    results = machine.runner().start(inputs, ["sentence_embedding"])()
    assert list(results) == ["sentence_embedding"]
    mask = inputs["attention_mask"]
    kinds = np.array([0, 10, 20, 30, 40])[1:] * inputs["token_type_ids"][..., np.newaxis]
    without = {**inputs, "token_type_ids": np.zeros_like(mask)}
    plain = machine.runner().start(without, ["sentence_embedding"])()["sentence_embedding"]
    added = (kinds * mask[..., np.newaxis]).sum(1) / np.maximum(mask.sum(1), 1)[:, np.newaxis]
    np.testing.assert_allclose(results["sentence_embedding"] - plain, added, atol=1e-4)


def test_a_row_with_nan_leaves_the_others_and_its_padding_alone(machine: Machine) -> None:
    runner = machine.runner(graphs="on")
    batch = new_batch(3, 20, "none")
    batch["input_ids"][1, 4] = 9
    batch["attention_mask"][1, 10:] = 0
    for _ in range(4):
        values = runner.start(batch, [HIDDEN])()[HIDDEN]
        assert np.isnan(values[1, :10]).all()
        assert (values[1, 10:] == 0).all()
        rest = {name: np.delete(array, 1, axis=0) for name, array in batch.items()}
        machine.check(rest, {HIDDEN: np.delete(values, 1, axis=0)})


def test_a_refusal_of_the_driver_is_an_error_and_the_next_batch_runs(new_machine: MachineMaker) -> None:
    for call in ["cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuEventRecord", "cuStreamWaitEvent"]:
        with named_case(call):
            machine = new_machine()
            runner = machine.runner()
            machine.run(runner, new_batch(2, 20))
            machine.device.failing[call] = Code.INVALID_VALUE
            with pytest.raises(BackendError, match=f"CUDA error 1 at {call}: invalid_value"):
                runner.start(new_batch(2, 30), [HIDDEN])()
            machine.device.failing.clear()
            for seed in range(3):
                machine.run(runner, new_batch(2, 30, seed=seed))


def test_a_broken_cuda_context_is_an_error_of_the_results_and_closing_works(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    runner = machine.runner()
    started = runner.start(new_batch(2, 20), [HIDDEN])
    machine.device.broken = Code.ILLEGAL_ADDRESS
    with pytest.raises(BackendError, match=r"CUDA error 700 at .*(.|\n)*start a new process"):
        started()
    with pytest.raises(BackendError, match="CUDA error 700"):
        runner.start(new_batch(2, 20), [HIDDEN])()
    machine.opened.clear()
    runner.close()
    assert "some GPU memory could not be freed" in caplog.text


def test_two_runners_of_one_gpu_do_not_touch_each_other(machine: Machine) -> None:
    runners = [machine.runner(), machine.runner()]
    for seed in range(4):
        batches = [new_batch(2, 20, seed=seed), new_batch(3, 60, seed=seed)]
        started = [runner.start(batch, [HIDDEN]) for runner, batch in zip(runners, batches, strict=True)]
        for batch, results in zip(batches, started, strict=True):
            machine.check(batch, results())
    runners[0].close()
    machine.run(runners[1], new_batch(2, 20))


def test_whichever_allocation_fails_nothing_is_lost(new_machine: MachineMaker) -> None:
    for number in range(12):
        for call in ["cuMemAlloc", "cuMemHostAlloc"]:
            with named_case(number, call):
                machine = new_machine()
                runner = machine.runner(graphs="on")
                machine.device.failing_after = (call, number)
                for seed in range(4):
                    batch = new_batch(4, (20, 200)[seed // 2], seed=seed)
                    try:
                        machine.run(runner, batch)
                    except BackendError:
                        machine.run(runner, batch)
                assert machine.device.failing_after is None or number >= 4, "no fewer are made"
                machine.device.failing_after = None
