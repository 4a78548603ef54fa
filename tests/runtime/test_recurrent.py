"""Models with a memory: each call gets the memory of the previous one, row by row, in any batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdruntime
from hdexport.support.bundle_writer import seal
from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import BundleCorruptError, InputError, OutOfMemoryError
from hdruntime.inference.inputs import checked_inputs
from hdruntime.session import Session
from support.backend_sessions import BACKENDS, session_in
from support.comparators import assert_close, named_case
from support.recurrent_bundle import (
    MEMORY,
    NEW_MEMORY,
    RecurrentAnswer,
    make_recurrent_bundle,
    recurrent_states,
    with_memory_of,
)
from support.tiny_bundle import NAN_ID

HIDDEN = "last_hidden_state"


@pytest.fixture
def recurrent_path(tmp_path: Path) -> Path:
    return make_recurrent_bundle(tmp_path / "recurrent")


@pytest.fixture
def bundle(recurrent_path: Path) -> Bundle:
    return open_bundle(recurrent_path)


@pytest.fixture(params=BACKENDS)
def session(request: pytest.FixtureRequest, bundle: Bundle) -> Iterator[Session]:
    with session_in(request.param, bundle, request) as opened:
        yield opened


on_one_backend = pytest.mark.parametrize("session", ["onnxruntime"], indirect=True)
"""For what no backend decides."""


def batch_of(lengths: Sequence[int], tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ids and a mask, [rows, tokens], padded on the right."""
    ids = np.random.default_rng(seed).integers(0, NAN_ID, (len(lengths), tokens))
    return ids, (np.arange(tokens) < np.array(lengths)[:, None]).astype(np.int64)


def carried(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(100 + seed).standard_normal((rows, 1, 4, 4)).astype(np.float32)


def check(got: Mapping[str, np.ndarray], expected: RecurrentAnswer) -> None:
    assert got[HIDDEN].dtype == got[NEW_MEMORY].dtype == np.float32
    assert_close(got[HIDDEN], expected.states, atol=1e-5)
    assert_close(got[NEW_MEMORY], expected.memory, atol=1e-5)


# One call


def test_a_text_begins_with_a_memory_of_zeros(session: Session) -> None:
    ids, _ = batch_of([7] * 3, 7)
    zeros = np.zeros((3, 1, 4, 4), np.float32)
    check(session(input_ids=ids), recurrent_states(ids))
    check(session(input_ids=ids, memory=None), recurrent_states(ids))
    check(session(input_ids=ids, memory=zeros), recurrent_states(ids))


def test_a_given_memory_reaches_the_graph_and_is_not_changed(session: Session) -> None:
    ids, _ = batch_of([5] * 3, 5)
    old = carried(3).astype(np.float16).astype(np.float32)
    of_every_second_row: Any = np.repeat(old, 2, axis=0)[::2]
    kept = old.copy()
    for given in (old, old.astype(np.float64), old.astype(np.float16), old.tolist(), of_every_second_row):
        check(session(input_ids=ids, memory=given), recurrent_states(ids, None, old))
    np.testing.assert_array_equal(old, kept)


MASKS = {
    "padding on the right": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
    "padding of every row": [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]],
    "padding anywhere": [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 0, 0, 0]],
}


def test_rows_of_all_lengths_keep_their_own_memories(session: Session) -> None:
    """On the CPU rows run in groups by their length."""
    for name, mask in MASKS.items():
        with named_case(name):
            (ids, _), old = batch_of([5] * len(mask), 5), carried(len(mask))
            found = session(input_ids=ids, attention_mask=mask, memory=old)
            check(found, recurrent_states(ids, np.array(mask), old))


MEMORIES_THAT_DO_NOT_FIT = [
    (MEMORY, np.zeros((2, 1, 4, 4), np.int64), r"memory is of type int64; it must be float32\."),
    (MEMORY, [["a"]], r"memory is of type <U1; it must be float32\."),
    (MEMORY, [[0.0], [0.0, 1.0]], r"memory cannot be read: .*; give an array \[batch, 1, 4, 4\]\."),
    (MEMORY, np.zeros((1, 4, 4)), r"memory has shape \[1, 4, 4\]; it must be \[batch, 1, 4, 4\]\."),
    (MEMORY, np.zeros((2, 4, 1, 4)), r"memory has shape \[2, 4, 1, 4\]; for 2 rows it must be"),
    (MEMORY, np.zeros((1, 1, 4, 4)), r"memory has shape \[1, 1, 4, 4\]; for 2 rows .* output for the same rows\."),
    (NEW_MEMORY, np.zeros((2, 1, 4, 4)), r"Unknown input 'new_memory'; this bundle accepts .*attention_mask, mem"),
]


@on_one_backend
def test_a_memory_that_does_not_fit_is_refused(session: Session) -> None:
    for name, value, message in MEMORIES_THAT_DO_NOT_FIT:
        with named_case(message), pytest.raises(InputError, match=message):
            session(input_ids=[[2, 3], [4, 5]], **{name: value})


def test_inputs_are_in_the_manifests_order_and_types(bundle: Bundle) -> None:
    found = checked_inputs({MEMORY: carried(1), "input_ids": [[2, 3]]}, bundle.manifest)
    assert {name: (array.dtype.name, array.shape) for name, array in found.items()} == {
        "input_ids": ("int64", (1, 2)),
        "attention_mask": ("int64", (1, 2)),
        MEMORY: ("float32", (1, 1, 4, 4)),
    }
    assert list(found) == [spec.name for spec in bundle.manifest.inputs]


@on_one_backend
def test_a_memory_that_is_nan_is_refused(session: Session) -> None:
    old = np.zeros((3, 1, 4, 4), np.float32)
    old[1, 0, 2, 3] = np.nan
    with pytest.raises(InputError, match=r"memory holds NaN or infinity; give the previous call's output"):
        session(input_ids=[[2, 3]] * 3, **{MEMORY: old})


# Consecutive calls


def test_consecutive_calls_equal_the_reference_and_another_memory_would_be_noticed(session: Session) -> None:
    got: dict[str, np.ndarray] = {}
    memory = None
    for number, lengths in enumerate([(7, 7, 3), (2, 7, 7), (1, 5, 1), (6, 6, 6)]):
        ids, mask = batch_of(lengths, max(lengths), seed=number)
        answer = recurrent_states(ids, mask, memory)
        got = session(input_ids=ids, attention_mask=mask, memory=got.get(NEW_MEMORY))
        check(got, answer)
        memory = answer.memory
    for wrong in (None, memory[::-1]):
        with pytest.raises(AssertionError):
            check(session(input_ids=ids, memory=wrong), recurrent_states(ids, mask, memory))


# Texts


def test_texts_begin_with_zeros_in_any_batches(session: Session) -> None:
    texts = ["long documents are read", "", "whole", "are documents whole", "read"]
    encodings = session.tokenize(texts)
    alone = [recurrent_states(np.array([encoding.input_ids])) for encoding in encodings]
    for batch_tokens in (1, 12, None):
        results = session.infer(encodings, batch_tokens=batch_tokens, outputs=[HIDDEN, NEW_MEMORY])
        for result, expected in zip(results, alone, strict=True):
            assert result[NEW_MEMORY].shape == (1, 4, 4)
            check({name: values[None] for name, values in result.items()}, expected)
    assert_close(session.embed(texts), np.array([answer.states[0].mean(axis=0) for answer in alone]), atol=1e-5)
    (default,) = session.infer(encodings[:1])
    assert list(default) == [HIDDEN]


# Batches in parts


class TightRunner(OnnxRuntimeRunner):
    """Has memory for a few rows, and fails at the start of a batch or at its end."""

    rows, late, shapes = 2, False, ()

    def start(self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str]) -> Callable[[], dict[str, np.ndarray]]:
        self.shapes = (*self.shapes, inputs["input_ids"].shape)
        if len(inputs["input_ids"]) <= self.rows:
            return super().start(inputs, outputs)

        def fail() -> dict[str, np.ndarray]:
            raise OutOfMemoryError("no memory")

        return fail if self.late else fail()  # type: ignore[return-value]


@pytest.mark.parametrize(("late", "most"), [(False, None), (True, None), (True, 3)])
def test_a_batch_run_in_parts_keeps_the_memories_of_its_rows(bundle: Bundle, late: bool, most: int | None) -> None:
    runner = TightRunner(bundle)
    runner.late = late
    if most is not None:
        runner.max_rows = lambda tokens: most  # type: ignore[method-assign]
    ids, mask = batch_of([9, 3, 9, 1, 5, 3, 9], 9)
    with Session(bundle, runner) as session:
        first = recurrent_states(ids, mask)
        got = session(input_ids=ids, attention_mask=mask)
        check(got, first)
        again = session(input_ids=ids, attention_mask=mask, memory=got[NEW_MEMORY])
        check(again, recurrent_states(ids, mask, first.memory))
    assert runner.shapes[0][0] == (7 if most is None else most)
    assert max(rows for rows, _ in runner.shapes[-3:]) <= 2
    assert any(rows > 2 for rows, _ in runner.shapes), "a batch did not fit in memory"


# The graph and the manifest


def test_a_graph_whose_memory_is_not_the_manifests_is_refused(bundle: Bundle) -> None:
    seal(bundle.path, with_memory_of(bundle.manifest, 1, 4, 5))
    found = re.escape("memory float32 [batch, 1, 4, 4]")
    with pytest.raises(
        BundleCorruptError,
        match=rf"The inputs of model\.onnx are .*{found}, but the manifest of .*memory float32 \[batch, 1, 4, 5\]",
    ):
        hdruntime.load(bundle.path, "onnxruntime")
