"""Texts are given as a list, an iterator, an array or a column; what has keys, columns or no order is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import hdruntime
from hdruntime import CrossEncoder, SentenceEncoder
from hdruntime.errors import InputError
from support.comparators import named_case

TEXTS = ["long documents", "read", ""]

LISTS: dict[str, Callable[[], Any]] = {
    "a list": lambda: TEXTS,
    "a tuple": lambda: tuple(TEXTS),
    "a generator": lambda: (text for text in TEXTS),
    "an iterator": lambda: iter(TEXTS),
    "the values of a dict": lambda: dict(enumerate(TEXTS)).values(),
    "an array": lambda: np.array(TEXTS),
    "an array of objects": lambda: np.array(TEXTS, object),
    # By label, its first text would be "".
    "a column in another order": lambda: pd.Series(TEXTS, index=[2, 1, 0]),
    "a column without the label 0": lambda: pd.Series(TEXTS, index=["a", "b", "c"]),
    "a column of Arrow": lambda: pa.chunked_array([TEXTS[:1], TEXTS[1:]]),
}

OTHERS = [
    ({"text": "read"}, r"is of type dict, which has keys or columns; .*\nChoose the part that holds them"),
    (
        pd.DataFrame({"text": TEXTS}),
        r"is of type DataFrame, which has keys or columns; .*\nChoose the part that holds them",
    ),
    (set(TEXTS), r"is of type set, which has no order; .*\nSort it"),
    (b"read", r"is of type bytes; .*\nDecode it"),
    (None, "is of type NoneType; it must be a list of strings"),
    (np.array("read"), "is of type ndarray; it must be a list of strings"),
    (pd.Series(["read", None], dtype=object), r"\[1\] is None, of type NoneType; it must be a string"),
    ([b"read"], r"\[0\] is b'read', of type bytes; it must be a string"),
    (np.array([["read", "long"]]), r"\[0\] is array"),
]


@pytest.fixture
def calls(bundle_path: Path) -> Any:
    """Public methods that take texts -> what each gives of them, one row per text."""
    with hdruntime.load(bundle_path) as session, SentenceEncoder(bundle_path) as encoder:
        yield {
            "Session.embed": session.embed,
            "Session.tokenize": lambda texts: [each.input_ids for each in session.tokenize(texts)],
            "Session.split": lambda texts: [each.chunks[0].input_ids for each in session.split(texts)],
            "Session.embed_chunks": lambda texts: [
                each.vectors.sum() for each in session.embed_chunks(texts, chunks="tokens:4")
            ],
            "SentenceEncoder.encode": encoder.encode,
            "SentenceEncoder.encode_document": encoder.encode_document,
            "SentenceEncoder.preprocess": lambda texts: encoder.preprocess(texts)["input_ids"],
        }


def test_texts_that_have_an_order_are_taken_by_position(calls: dict[str, Callable[[Any], Any]]) -> None:
    for method, call in calls.items():
        expected = call(TEXTS)
        assert len(expected) == len(TEXTS)
        for kind, given in LISTS.items():
            with named_case(f"{method} of {kind}"):
                assert all(np.array_equal(*pair) for pair in zip(call(given()), expected, strict=True))


def test_what_is_no_list_of_texts_is_refused_and_said_what_to_do(calls: dict[str, Callable[[Any], Any]]) -> None:
    for method, call in calls.items():
        for given, message in OTHERS:
            with named_case(f"{method} of {type(given).__name__}"), pytest.raises(InputError, match=message):
                call(given)


def test_one_string_is_one_text_for_encoders_and_no_list_for_sessions(calls: dict[str, Callable[[Any], Any]]) -> None:
    assert calls["SentenceEncoder.encode"]("read").ndim == 1
    for method in ("Session.embed", "Session.tokenize", "Session.split", "SentenceEncoder.preprocess"):
        with named_case(method), pytest.raises(InputError, match=r"(texts|inputs) is one string; .* \[text\]"):
            calls[method]("read")


def test_chunks_of_texts_are_taken_by_position_as_the_texts_are(bundle_path: Path) -> None:
    texts, spans = TEXTS[:2], [[(0, 4)], [(0, 2)]]
    with hdruntime.load(bundle_path) as session:
        expected = [each.vectors for each in session.embed_chunks(texts, chunks=spans)]
        column = pd.Series(spans, index=[1, 0])
        for given in (column, iter(spans)):
            found = [each.vectors for each in session.embed_chunks(pd.Series(texts, index=[1, 0]), chunks=given)]
            np.testing.assert_array_equal(found, expected)
        for wrong, message in (({0: spans}, "chunks is of type dict"), ("", "There is no rule ''")):
            with pytest.raises(InputError, match=message):
                session.embed_chunks(texts[:1], chunks=wrong)


def test_pairs_and_documents_are_taken_and_refused_alike(new_bundle: Callable[..., Path]) -> None:
    frame = pd.DataFrame({"query": TEXTS, "document": TEXTS[::-1]}, index=[2, 1, 0])
    with CrossEncoder(new_bundle(task="text-classification")) as encoder:
        expected = encoder.predict(list(zip(TEXTS, TEXTS[::-1], strict=True)))
        for pairs in (zip(TEXTS, TEXTS[::-1], strict=True), frame.to_numpy(), frame.itertuples(index=False)):
            with named_case(type(pairs).__name__):
                np.testing.assert_array_equal(encoder.predict(pairs), expected)
        for given, message in ((frame, "DataFrame, which has keys or columns"), ({"a": "b"}, "dict, which has keys")):
            with named_case(message), pytest.raises(InputError, match=message):
                encoder.predict(given)
