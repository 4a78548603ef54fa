"""A memory is an engine's input and output like others: staged, padded by rows, or already on the GPU."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest

from fakes.machine import HIDDEN, ByDlpack, ByInterface, MachineMaker, new_batch, on_engines
from fakes.simulated_tensorrt import simulated_engine
from hdexport.support.bundle_writer import seal
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BundleCorruptError, InputError
from hdruntime.gpu.dlpack import DlTensor
from support.comparators import assert_close, named_case
from support.recurrent_bundle import (
    MEMORY,
    NEW_MEMORY,
    RecurrentAnswer,
    make_recurrent_bundle,
    recurrent_states,
    with_memory_of,
)


@pytest.fixture
def new_recurrent(new_machine: MachineMaker) -> MachineMaker:
    """Make a machine whose bundle has a memory."""
    return lambda seed=0, **options: new_machine(seed, made_by=make_recurrent_bundle, **options)


def with_memory(batch: Mapping[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    memory = np.random.default_rng(seed).standard_normal((len(batch["input_ids"]), 1, 4, 4)).astype(np.float32)
    return {**batch, MEMORY: memory}


def answer(batch: Mapping[str, np.ndarray]) -> RecurrentAnswer:
    return recurrent_states(batch["input_ids"], batch["attention_mask"], batch.get(MEMORY))


def check(batch: Mapping[str, np.ndarray], results: Mapping[str, np.ndarray]) -> None:
    expected = answer(batch)
    assert_close(results[HIDDEN], expected.states, atol=1e-5)
    assert_close(results[NEW_MEMORY], expected.memory, atol=1e-5)


@pytest.mark.parametrize(("engine_type", "graphs"), [("INT64", "on"), ("INT32", "off")])
def test_memories_are_right_for_any_padded_shape(engine_type: str, graphs: str, new_recurrent: MachineMaker) -> None:
    machine = new_recurrent(input_type=engine_type)
    session = machine.session(graphs=graphs)
    for batch, tokens in itertools.product((1, 3, 4), (1, 16, 32, 33, 200)):
        for number, padding in enumerate(("none", "right", "left", "holes", "all")):
            with named_case(batch, tokens, padding):
                given = with_memory(new_batch(batch, tokens, padding), number)
                check(given, session(**given))
                del given[MEMORY]
                check(given, session(**given))


def test_memories_of_batches_in_flight_do_not_touch_each_other(new_recurrent: MachineMaker) -> None:
    for seed in range(4):
        with named_case(seed):
            machine = new_recurrent(seed)
            runner = machine.runner()
            batches = [
                with_memory(new_batch(1 + number % 4, 20 + 30 * (number % 2), seed=number), number)
                for number in range(8)
            ]
            started = [runner.start(batch, [HIDDEN, NEW_MEMORY]) for batch in batches]
            for batch, results in zip(batches, started, strict=True):
                check(batch, results())


# On the GPU


def test_arrays_on_the_gpu_give_the_models_answers_there(new_recurrent: MachineMaker) -> None:
    for seed, kind, dtype in [
        (0, ByDlpack, np.int64),
        (1, ByDlpack, np.int32),
        (1, ByInterface, np.int64),
        (2, ByInterface, np.int32),
    ]:
        with named_case(seed, kind, dtype):
            machine = new_recurrent(seed)
            session = machine.session()
            results = []
            for number, (rows, tokens) in enumerate([(1, 1), (3, 20), (1, 40), (4, 200), (3, 20)]):
                batch = with_memory(
                    new_batch(rows, tokens, ("right", "left", "holes", "all")[number % 4], seed=number), number
                )
                results.append((batch, session.run_on_device(**machine.on_gpu(batch, kind, dtype))))
            for batch, arrays in results:
                assert arrays[NEW_MEMORY].shape == (len(batch["input_ids"]), 1, 4, 4)
                check(batch, {name: array.to_numpy() for name, array in arrays.items()})


def test_a_memory_on_the_gpu_is_fed_back_without_a_copy_through_the_cpu(new_recurrent: MachineMaker) -> None:
    machine = new_recurrent()
    session = machine.session()
    first, second = (new_batch(3, 20, "right", seed=seed) for seed in (1, 2))
    zeros = {MEMORY: np.zeros((3, 1, 4, 4), np.float32)}
    left = session.run_on_device(**machine.on_gpu({**first, **zeros}))
    got = session.run_on_device(**machine.on_gpu(second), memory=left[NEW_MEMORY])
    check({**second, MEMORY: answer(first).memory}, {name: array.to_numpy() for name, array in got.items()})


class Transposed(ByDlpack):
    """A memory whose last two axes are swapped, so that it is not contiguous."""

    def described(self) -> DlTensor:
        return super().described()._replace(strides=(16, 16, 1, 4))


def test_a_memory_on_the_gpu_that_does_not_fit_is_refused(new_recurrent: MachineMaker) -> None:
    for kind, memory, message in [
        (ByDlpack, np.zeros((2, 1, 4, 4), np.int64), r"memory is of type int64; on the GPU it must be float32\."),
        (ByDlpack, np.zeros((2, 4, 4), np.float32), r"memory has shape \[2, 4, 4\]; it must be \[batch, 1, 4, 4\]"),
        (ByDlpack, np.zeros((3, 1, 4, 4), np.float32), r"The inputs have the shapes .*; they must be equal"),
        (Transposed, np.zeros((2, 1, 4, 4), np.float32), r"memory is not contiguous \(strides \[16, 16, 1, 4\]\)"),
    ]:
        with named_case(kind, memory, message):
            machine = new_recurrent()
            session = machine.session()
            batch = new_batch(2, 20)
            given = {**machine.on_gpu(batch), **machine.on_gpu({MEMORY: memory}, kind)}
            with pytest.raises(InputError, match=message):
                session.run_on_device(**given)
            with pytest.raises(InputError, match=r"this bundle needs all of input_ids, attention_mask, memory"):
                session.run_on_device(**machine.on_gpu(batch))


# The engine and the manifest


@on_engines
def test_an_engine_whose_memory_is_not_the_manifests_is_refused(new_recurrent: MachineMaker) -> None:
    machine = new_recurrent()
    machine.bundle = Bundle(machine.bundle.path, with_memory_of(machine.bundle.manifest, 1, 4, 5))
    with pytest.raises(BundleCorruptError, match=r"profiles \[\(\(1, 1, 4, 4\), .* of memory, but .*\(1, 1, 4, 5\)"):
        machine.runner()


@on_engines
def test_an_engine_without_the_memory_is_refused(new_recurrent: MachineMaker, new_machine: MachineMaker) -> None:
    other = new_machine().bundle
    machine = new_recurrent()
    engine = machine.bundle.manifest.engines[0]
    model = (other.path / "model.onnx").read_bytes()
    (machine.bundle.path / engine.file).write_bytes(simulated_engine(model, engine.profiles))
    machine.bundle = Bundle(machine.bundle.path, seal(machine.bundle.path, machine.bundle.manifest))
    with pytest.raises(BundleCorruptError, match=r"The engine has tensors .* lists input_ids of .*, memory of FLOAT\."):
        machine.runner()
