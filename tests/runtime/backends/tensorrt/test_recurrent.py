"""A memory goes to an engine and comes from it as other inputs do: staged, padded by rows, or on the GPU already."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from fakes.arrays_on_gpu import ByDlpack, ByInterface, OnGpu
from fakes.simulated_tensorrt import simulated_engine
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.writer import seal
from hdruntime.errors import BundleCorruptError, InputError
from hdruntime.gpu.dlpack import DlTensor, capsule_of
from hdruntime.session import Session
from support.comparators import assert_close
from support.recurrent_bundle import MEMORY, NEW_MEMORY, RecurrentAnswer, recurrent_states

HIDDEN = "last_hidden_state"

Batches = Callable[..., dict[str, np.ndarray]]
Arrays = Callable[..., dict[str, Any]]


@pytest.fixture
def new_recurrent(new_machine: Any) -> Callable[..., Any]:
    """Make a machine whose bundle has a memory."""
    return lambda seed=0, **options: new_machine(seed, recurrent=True, **options)


def with_memory(batch: Mapping[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    memory = np.random.default_rng(seed).standard_normal((len(batch["input_ids"]), 1, 4, 4)).astype(np.float32)
    return {**batch, MEMORY: memory}


def answer(batch: Mapping[str, np.ndarray]) -> RecurrentAnswer:
    return recurrent_states(batch["input_ids"], batch["attention_mask"], batch.get(MEMORY))


def check(batch: Mapping[str, np.ndarray], results: Mapping[str, np.ndarray]) -> None:
    expected = answer(batch)
    assert_close(results[HIDDEN], expected.states, atol=1e-5)
    assert_close(results[NEW_MEMORY], expected.memory, atol=1e-5)


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("engine_type", ["INT64", "INT32"])
@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("tokens", [1, 16, 32, 33, 200])
def test_memories_are_computed_with_whatever_a_batch_is_padded_to(
    tokens: int, batch: int, engine_type: str, graphs: str, new_recurrent: Any, new_batch: Batches
) -> None:
    machine = new_recurrent(input_type=engine_type)
    session = Session(machine.bundle, machine.runner(graphs=graphs))
    for number, padding in enumerate(("none", "right", "left", "holes", "all")):
        given = with_memory(new_batch(batch, tokens, padding), number)
        check(given, session(**given))
        del given[MEMORY]
        check(given, session(**given))


@pytest.mark.parametrize("seed", range(4))
def test_memories_of_batches_in_flight_do_not_touch_each_other(
    seed: int, new_recurrent: Any, new_batch: Batches
) -> None:
    machine = new_recurrent(seed)
    runner = machine.runner()
    batches = [
        with_memory(new_batch(1 + number % 4, 20 + 30 * (number % 2), seed=number), number) for number in range(8)
    ]
    started = [runner.start(batch, [HIDDEN, NEW_MEMORY]) for batch in batches]
    for batch, results in zip(batches, started, strict=True):
        check(batch, results())


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("rows", [1, 3])
def test_segments_one_after_another_are_as_computed_by_hand(
    rows: int, graphs: str, new_recurrent: Any, new_batch: Batches
) -> None:
    machine = new_recurrent()
    session = Session(machine.bundle, machine.runner(graphs=graphs))
    call, memory = session.recurrent(), {}
    for number, tokens in enumerate((32, 32, 20, 60, 1)):
        batch = new_batch(rows, tokens, "right", seed=number)
        check({**batch, **memory}, call(**batch))
        memory = {MEMORY: answer({**batch, **memory}).memory}


def test_a_batch_of_more_rows_than_any_profile_takes_keeps_their_memories(
    new_recurrent: Any, new_batch: Batches
) -> None:
    machine = new_recurrent()
    session = Session(machine.bundle, machine.runner())
    batch = with_memory(new_batch(19, 30, "right"))
    check(batch, session(**batch))
    assert max(rows for rows, _ in machine.trt.shapes_run) == 8


def test_a_batch_that_is_halved_for_want_of_memory_keeps_its_rows_memories(
    new_recurrent: Any, new_batch: Batches
) -> None:
    machine = new_recurrent()
    machine.trt.scratch_bytes = 2000
    session = Session(machine.bundle, machine.runner())
    # Two rows of 200 tokens fit, four do not.
    machine.device.free_bytes = 1_300_000
    batch = with_memory(new_batch(4, 200, "right"))
    check(batch, session(**batch))
    assert (2, 200) in machine.trt.shapes_run
    assert (4, 200) not in machine.trt.shapes_run


def test_texts_begin_with_zeros(new_recurrent: Any) -> None:
    machine = new_recurrent()
    session = Session(machine.bundle, machine.runner())
    batch = with_memory({"input_ids": np.full((4, 20), 5), "attention_mask": np.ones((4, 20), np.int64)})
    session(**batch)  # another's memory is in the staging memory now
    encodings = session.tokenize(["long documents", "whole", "are read"])
    for encoding, result in zip(encodings, session.infer(encodings), strict=True):
        ids = np.array([encoding.input_ids])
        check({"input_ids": ids, "attention_mask": np.ones_like(ids)}, {k: v[None] for k, v in result.items()})


# On the GPU


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [ByDlpack, ByInterface])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_arrays_on_the_gpu_give_the_models_answers_there(
    dtype: type, kind: type, seed: int, new_recurrent: Any, new_batch: Batches, on_gpu: Arrays
) -> None:
    machine = new_recurrent(seed)
    session = Session(machine.bundle, machine.runner())
    results = []
    for number, (rows, tokens) in enumerate([(1, 1), (3, 20), (1, 40), (4, 200), (3, 20)]):
        batch = with_memory(new_batch(rows, tokens, ("right", "left", "holes", "all")[number % 4], seed=number), number)
        results.append((batch, session.run_on_device(**on_gpu(machine, batch, kind, dtype))))
    for batch, arrays in results:
        assert arrays[NEW_MEMORY].shape == (len(batch["input_ids"]), 1, 4, 4)
        check(batch, {name: array.to_numpy() for name, array in arrays.items()})
    del arrays, results


def test_a_memory_on_the_gpu_goes_round_without_a_copy_through_the_cpu(
    new_recurrent: Any, new_batch: Batches, on_gpu: Arrays
) -> None:
    machine = new_recurrent()
    session = Session(machine.bundle, machine.runner())
    first, second = (new_batch(3, 20, "right", seed=seed) for seed in (1, 2))
    zeros = {MEMORY: np.zeros((3, 1, 4, 4), np.float32)}
    left = session.run_on_device(**on_gpu(machine, {**first, **zeros}, ByDlpack))
    got = session.run_on_device(**on_gpu(machine, second, ByDlpack), memory=left[NEW_MEMORY])
    check({**second, MEMORY: answer(first).memory}, {name: array.to_numpy() for name, array in got.items()})
    del left, got


class Transposed(OnGpu):
    """A memory whose last two axes are swapped, and so not contiguous."""

    __dlpack_device__ = ByDlpack.__dlpack_device__
    place = ByDlpack.place

    def __dlpack__(self, *, stream: int) -> Any:
        values = self.values
        tensor = DlTensor(
            address=self.address,
            shape=values.shape,
            strides=(16, 16, 1, 4),
            dtype=values.dtype,
            device=self.place,
        )
        return capsule_of(tensor, self)


@pytest.mark.parametrize(
    ("kind", "memory", "message"),
    [
        (ByDlpack, np.zeros((2, 1, 4, 4), np.int64), r"memory is of type int64; on the GPU it must be float32\."),
        (ByDlpack, np.zeros((2, 1, 4, 4)), r"memory is of type float64; on the GPU it must be float32\."),
        (ByDlpack, np.zeros((2, 4, 4), np.float32), r"memory has shape \[2, 4, 4\]; it must be \[batch, 1, 4, 4\]"),
        (ByInterface, np.zeros((2, 1, 4, 5), np.float32), r"memory has shape \[2, 1, 4, 5\]; it must be \[batch, 1, 4"),
        (ByDlpack, np.zeros((3, 1, 4, 4), np.float32), r"The inputs have the shapes .*; they must be equal"),
        (Transposed, np.zeros((2, 1, 4, 4), np.float32), r"memory is not contiguous \(strides \[16, 16, 1, 4\]\)"),
    ],
)
def test_a_memory_on_the_gpu_that_does_not_fit_is_refused(
    kind: type, memory: np.ndarray, message: str, new_recurrent: Any, new_batch: Batches, on_gpu: Arrays
) -> None:
    machine = new_recurrent()
    session = Session(machine.bundle, machine.runner())
    batch = new_batch(2, 20)
    given = {**on_gpu(machine, batch, ByDlpack), **on_gpu(machine, {MEMORY: memory}, kind)}
    with pytest.raises(InputError, match=message):
        session.run_on_device(**given)
    with pytest.raises(InputError, match=r"this engine wants all of input_ids, attention_mask, memory"):
        session.run_on_device(**on_gpu(machine, batch, ByDlpack))


# The engine and the manifest


def test_an_engine_whose_memory_is_not_the_manifests_is_refused(new_recurrent: Any) -> None:
    machine = new_recurrent()
    manifest = machine.bundle.manifest
    sizes = {
        key: tuple(
            dataclasses.replace(spec, shape=("batch", 1, 4, 5)) if spec.name in (MEMORY, NEW_MEMORY) else spec
            for spec in getattr(manifest, key)
        )
        for key in ("inputs", "outputs")
    }
    machine.bundle = Bundle(machine.bundle.path, dataclasses.replace(manifest, **sizes))
    with pytest.raises(BundleCorruptError, match=r"profiles \[\(\(1, 1, 4, 4\), .* of memory, but .*\(1, 1, 4, 5\)"):
        machine.runner()


def test_an_engine_without_the_memory_is_refused(new_recurrent: Any, new_machine: Any) -> None:
    other = new_machine().bundle
    machine = new_recurrent()
    engine = machine.bundle.manifest.engines[0]
    model = (other.path / "model.onnx").read_bytes()
    (machine.bundle.path / engine.file).write_bytes(simulated_engine(model, engine.profiles))
    machine.bundle = Bundle(machine.bundle.path, seal(machine.bundle.path, machine.bundle.manifest))
    with pytest.raises(BundleCorruptError, match=r"The engine has tensors .* lists input_ids of .*, memory of FLOAT\."):
        machine.runner()
