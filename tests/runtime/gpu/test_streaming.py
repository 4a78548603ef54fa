"""What a stream remembers stays on the GPU: models read and replace it there, and CUDA graphs are replayed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fakes.machine import HIDDEN, Machine, MachineMaker, on_engines
from hdruntime.bundle.manifest import ProfileShape
from hdruntime.errors import InputError
from hdruntime.session import Session
from support.comparators import assert_close, named_case
from support.recurrent_bundle import (
    REMEMBERED,
    make_recurrent_bundle,
    make_streaming_bundle,
    recurrent_states,
    streamed_states,
    tokens_answer,
)
from support.tiny_bundle import NAN_ID

MEMORY = (1, REMEMBERED, REMEMBERED)
SHORT = ProfileShape(batch=(1, 1, 8), tokens=(1, 32, 32), memory=MEMORY)
LONG = ProfileShape(batch=(2, 2, 4), tokens=(48, 128, 200), memory=MEMORY)


@pytest.fixture
def new_streaming(new_machine: MachineMaker) -> MachineMaker:
    """Make a machine whose bundle remembers tokens."""

    def make(seed: int = 0, *, attended: bool = False, **options: Any) -> Machine:
        made_by = functools.partial(make_streaming_bundle, attended=attended)
        return new_machine(seed, made_by=made_by, **{"profiles": (SHORT, LONG), **options})

    return make


def document(tokens: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(1000 * seed + tokens).integers(0, NAN_ID, tokens).tolist()
    return ids


def streamed(session: Session, documents: list[list[int]], **options: Any) -> dict[int, np.ndarray]:
    parts: dict[int, list[np.ndarray]] = {}
    for segment in session.stream_all(documents, **options):
        assert segment.error is None
        parts.setdefault(segment.document, []).append(segment.outputs[HIDDEN])
    return {number: np.concatenate(found) for number, found in parts.items()}


@pytest.mark.parametrize(
    ("segment", "rows", "engine_type", "graphs", "attended"),
    [
        (1, 1, "INT64", "on", False),
        (20, 1, "INT32", "off", True),
        (20, 3, "INT64", "on", False),
        (32, 8, "INT32", "off", True),
        (50, 1, "INT64", "on", False),
        (200, 4, "INT64", "on", True),
    ],
)
def test_interleaved_documents_equal_the_model_by_hand(
    segment: int, rows: int, engine_type: str, graphs: str, attended: bool, new_streaming: MachineMaker
) -> None:
    """20 and 50 tokens are padded on the GPU, which must not be remembered."""
    machine = new_streaming(segment, input_type=engine_type, attended=attended)
    documents = [document(tokens, seed) for seed, tokens in enumerate((3 * segment, 1, segment, 2 * segment + 3, 7))]
    found = streamed(machine.session(graphs=graphs), documents, segment=segment, rows=rows)
    for number, ids in enumerate(documents):
        assert_close(found[number], streamed_states(ids, segment, attended=attended), atol=1e-5)
    assert len(set(machine.trt.shapes_run)) == 1, "all batches have one shape"


def test_streams_in_turn_and_batches_between_them_do_not_touch_each_other(new_streaming: MachineMaker) -> None:
    for seed in range(4):
        with named_case(seed):
            machine = new_streaming(seed)
            session = machine.session(graphs="on")
            documents = [document(100, number) for number in range(3)]
            streams = [session.stream(ids, segment=20) for ids in documents]
            steps = []
            for number in range(5):
                steps.append([next(stream) for stream in streams])
                ids, memory = np.array([document(20, number)]), np.full((1, 3, 4), number, np.float32)
                got = session(input_ids=ids, **{"mems.0": memory, "mems.mask": np.ones((1, 3))})
                expected = tokens_answer(ids, np.ones_like(ids), memory, np.ones((1, 3)))
                assert_close(got[HIDDEN], expected.states, atol=1e-5)
                assert_close(got["new_mems.0"], expected.vectors, atol=1e-5)
            for number, ids in enumerate(documents):
                found = np.concatenate([step[number].outputs[HIDDEN] for step in steps])
                assert_close(found, streamed_states(ids, 20), atol=1e-5)


def copies(machine: Machine) -> dict[str, list[int]]:
    """Record the sizes of all copies between the host and the GPU from here on, by the name of their call."""
    sizes: dict[str, list[int]] = {}
    for name in ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoH"):
        call = getattr(machine.device, name)

        def recording(*arguments: Any, name: str = name, call: Any = call) -> Any:
            sizes.setdefault(name, []).append(arguments[2])
            return call(*arguments)

        setattr(machine.device, name, recording)
    return sizes


@pytest.fixture
def warm_stream(new_streaming: MachineMaker) -> Iterator[tuple[Machine, Any]]:
    """A stream of two rows after its first segments, when a graph of its shape is captured."""
    machine = new_streaming()
    session = machine.session(graphs="on")
    stream = session.stream_all([document(320, 1), document(320, 2)], segment=16, rows=2)
    for _ in range(8):
        next(stream)
    yield machine, stream
    stream.close()


def test_no_memory_is_copied_between_the_host_and_the_gpu(warm_stream: tuple[Machine, Any]) -> None:
    machine, stream = warm_stream
    sizes = copies(machine)
    assert len(list(stream)) == 32
    states, ids_and_mask = 2 * 16 * 4 * 4, 2 * 256
    assert sizes == {"cuMemcpyDtoHAsync": [states] * 16, "cuMemcpyHtoDAsync": [ids_and_mask] * 16}


@on_engines
def test_one_graph_is_replayed_for_every_segment(warm_stream: tuple[Machine, Any]) -> None:
    machine, stream = warm_stream
    machine.device.calls.clear()
    enqueued = len(machine.trt.shapes_run)
    assert len(list(stream)) == 32
    assert machine.device.calls.count("cuGraphLaunch") == 16
    assert "cuStreamBeginCapture" not in machine.device.calls
    assert len(machine.trt.shapes_run) == enqueued, "nothing is enqueued without a graph"
    assert "cuMemAlloc" not in machine.device.calls


def test_memories_of_a_fixed_size_are_carried(new_machine: MachineMaker) -> None:
    machine = new_machine(made_by=make_recurrent_bundle)
    ids, memory, expected = document(90), None, []
    for start in range(0, 90, 20):
        answer = recurrent_states(np.array([ids[start : start + 20]]), None, memory)
        memory = answer.memory
        expected.append(answer.states[0])
    found = streamed(machine.session(), [ids], segment=20)
    assert_close(found[0], np.concatenate(expected), atol=1e-5)


def test_rows_of_padding_have_no_memory(new_streaming: MachineMaker) -> None:
    for profiles in [(LONG,), (ProfileShape(batch=(2, 2, 8), tokens=(1, 64, 64), memory=(4, 4, 6)),)]:
        with named_case(profiles):
            ids = document(150)
            found = streamed(new_streaming(profiles=profiles).session(), [ids], segment=50)
            assert_close(found[0], streamed_states(ids, 50), atol=1e-5)


@on_engines
def test_a_memory_that_no_profile_accepts_is_refused(new_streaming: MachineMaker) -> None:
    few = ProfileShape(batch=(1, 1, 8), tokens=(1, 32, 32), memory=(2, 4, 4))
    session = new_streaming(profiles=(few,)).session()
    with pytest.raises(InputError, match=r"memories have 6 tokens; this engine accepts 2 to 4\.\nGive it other"):
        next(session.stream(document(30), segment=20))
    with pytest.raises(InputError, match=r"memories have 1 tokens; this engine accepts 2 to 4"):
        session.infer(session.tokenize(["long"]))


def test_memories_on_the_gpu_of_different_sizes_are_refused(new_streaming: MachineMaker) -> None:
    machine = new_streaming()
    batch = {
        "input_ids": np.array([[2, 3]]),
        "attention_mask": np.ones((1, 2), np.int64),
        "mems.0": np.zeros((1, 3, 4), np.float32),
        "mems.mask": np.zeros((1, 2), np.float32),
    }
    with pytest.raises(InputError, match=r"memory caches of different sizes: \{'mems\.0': 3, 'mems\.mask': 2\}"):
        machine.session().run_on_device(**machine.on_gpu(batch))


def test_memories_of_tokens_on_the_gpu_are_fed_back(new_streaming: MachineMaker) -> None:
    machine = new_streaming()
    session = machine.session()
    ids = np.array([document(20)])
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    start = np.zeros((1, REMEMBERED, 4), np.float32), np.zeros((1, REMEMBERED), np.float32)
    left = session.run_on_device(**machine.on_gpu({**batch, "mems.0": start[0], "mems.mask": start[1]}))
    carried = {name: left[f"new_{name}"] for name in ("mems.0", "mems.mask")}
    assert {name: array.shape for name, array in carried.items()} == {"mems.0": (1, 6, 4), "mems.mask": (1, 6)}
    again = session.run_on_device(**machine.on_gpu(batch), **carried)
    first = tokens_answer(ids, np.ones_like(ids), *start)
    assert_close(again[HIDDEN].to_numpy(), tokens_answer(ids, np.ones_like(ids), *first[1:]).states, atol=1e-5)
