"""Memories of tokens: any size up to the bundle's, all of one size; texts that are run alone remember nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hdruntime
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import InputError
from hdruntime.session import Session
from support.backend_sessions import BACKENDS, session_in
from support.comparators import assert_close, named_case
from support.recurrent_bundle import (
    REMEMBERED,
    TokensAnswer,
    make_streaming_bundle,
    tokens_answer,
)
from support.tiny_bundle import HIDDEN_SIZE, NAN_ID, TABLE

HIDDEN = "last_hidden_state"
LEFT = ("new_mems.0", "new_mems.mask")


@pytest.fixture(params=BACKENDS)
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    bundle = open_bundle(make_streaming_bundle(tmp_path / "bundle"))
    with session_in(request.param, bundle, request) as opened:
        yield opened


on_one_backend = pytest.mark.parametrize("session", ["onnxruntime"], indirect=True)
"""For what no backend decides."""


def batch_of(rows: int, tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, NAN_ID, (rows, tokens))


def carried(rows: int, tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(100 + seed)
    return {
        "mems.0": generator.standard_normal((rows, tokens, HIDDEN_SIZE)).astype(np.float32),
        "mems.mask": generator.integers(0, 2, (rows, tokens)).astype(np.float32),
    }


def check(got: dict[str, np.ndarray], expected: TokensAnswer) -> None:
    for name, values in zip((HIDDEN, *LEFT), expected, strict=True):
        assert got[name].dtype == np.float32
        assert_close(got[name], values, atol=1e-5)


def test_memories_of_any_size_reach_the_graph(session: Session) -> None:
    for rows, memory, tokens in itertools.product([1, 3], [1, 2, REMEMBERED], [1, REMEMBERED, 16]):
        with named_case(rows, memory, tokens):
            ids, given = batch_of(rows, tokens), carried(rows, memory)
            expected = tokens_answer(ids, np.ones_like(ids), given["mems.0"], given["mems.mask"])
            check(session(input_ids=ids, **given), expected)


def test_a_call_begins_with_the_most_that_it_can_remember(session: Session) -> None:
    ids = batch_of(2, 4)
    nothing = np.zeros((2, REMEMBERED, HIDDEN_SIZE)), np.zeros((2, REMEMBERED))
    check(session(input_ids=ids), tokens_answer(ids, np.ones_like(ids), *nothing))


def test_a_memory_that_is_left_out_has_the_size_of_those_given(session: Session) -> None:
    ids, given = batch_of(2, 4), carried(2, 3)
    expected = tokens_answer(ids, np.ones_like(ids), given["mems.0"], np.zeros((2, 3)))
    check(session(input_ids=ids, **{"mems.0": given["mems.0"]}), expected)


def test_texts_are_run_alone_and_their_results_hold_no_memories(session: Session) -> None:
    encodings = session.tokenize(["long documents", "", "are documents read whole"])
    for encoding, result in zip(encodings, session.infer(encodings), strict=True):
        assert list(result) == [HIDDEN]
        assert_close(result[HIDDEN], TABLE[encoding.input_ids], atol=1e-6)
    (with_memory,) = session.infer(encodings[:1], outputs=["new_mems.mask"])
    assert with_memory["new_mems.mask"].shape == (1,), "a text alone has the least memory"
    assert_close(session.embed(["long documents"])[0], TABLE[encodings[0].input_ids].mean(0), atol=1e-6)


def test_where_what_is_not_there_is_attended_to_texts_alone_have_all_of_it(tmp_path: Path) -> None:
    with hdruntime.load(make_streaming_bundle(tmp_path / "bundle", attended=True), "onnxruntime") as session:
        (result,) = session.infer(session.tokenize(["long"]), outputs=list(LEFT))
        assert result["new_mems.mask"].tolist() == [1.0] * REMEMBERED
        assert session(input_ids=[[2, 3]])["new_mems.mask"].tolist() == [[1.0] * REMEMBERED]


MEMORIES_THAT_DO_NOT_FIT = [
    (
        {"mems.0": np.zeros((2, 7, 4))},
        r"mems\.0 has shape \[2, 7, 4\]; for 2 rows .* memory being 1 to 6: the prev",
    ),
    ({"mems.0": np.zeros((2, 0, 4))}, r"mems\.0 has shape \[2, 0, 4\]; .* memory being 1 to 6"),
    ({"mems.0": np.zeros((2, 3))}, r"mems\.0 has shape \[2, 3\]; it must be \[batch, memory, 4\]"),
    (
        {"mems.0": np.zeros((2, 4, 4))},
        r"caches of different sizes: mems\.0 has 4, mems\.mask has 3\.\nPass the states",
    ),
    ({"mems.1": np.zeros((2, 3, 4))}, r"Unknown input 'mems\.1'; this bundle accepts .*, mems\.0, mems\.mask\."),
]


@on_one_backend
def test_memories_that_do_not_fit_are_refused(session: Session) -> None:
    for changes, message in MEMORIES_THAT_DO_NOT_FIT:
        with named_case(message), pytest.raises(InputError, match=message):
            session(input_ids=batch_of(2, 4), **(carried(2, 3) | changes))


def test_a_bundle_without_memories_says_how_to_build_one(bundle_path: Path) -> None:
    with (
        hdruntime.load(bundle_path, "onnxruntime") as session,
        pytest.raises(
            InputError,
            match=r"'mems\.0'; .*\nThis bundle has no recurrent states.* hdexport build MODEL .*--recurrence 512",
        ),
    ):
        session(input_ids=[[2, 3]], **{"mems.0": np.zeros((1, 3, 4))})
