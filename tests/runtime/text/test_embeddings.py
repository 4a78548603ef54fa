"""Embeddings truncated, normalised and quantised, beside sentence-transformers and PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hdruntime.errors import InputError
from hdruntime.text.embeddings import EmbeddingPrecision, normalized, quantized, truncated
from support.comparators import named_case

THEIR_PRECISIONS = [each.value for each in EmbeddingPrecision if each is not EmbeddingPrecision.FLOAT16]

Array = npt.NDArray[Any]


def embeddings(rows: int = 150, dimensions: int = 21) -> Array:
    values = np.random.default_rng(0).normal(size=(rows, dimensions)).astype(np.float32)
    values[:, 0] = 0  # A dimension of a single value.
    return values


def quantized_by_them(values: Array, precision: str, ranges: Array | None = None) -> Array:
    quantization = pytest.importorskip("sentence_transformers.util.quantization")
    theirs: Array = quantization.quantize_embeddings(values, precision=precision, ranges=ranges)
    return theirs


def assert_same_bytes(ours: Array, theirs: Array) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert ours.tobytes() == theirs.tobytes()


def test_quantised_embeddings_equal_those_of_sentence_transformers() -> None:
    dtypes = [np.float32, np.float64, np.float16]
    for precision, dtype, rows, dimensions in itertools.product(THEIR_PRECISIONS, dtypes, [0, 150], [1, 8, 21]):
        with named_case(precision, dtype, rows, dimensions):
            values = embeddings(rows, dimensions).astype(dtype)
            assert_same_bytes(quantized(values, precision), quantized_by_them(values, precision))


def test_given_ranges_are_used_and_clip_what_is_outside() -> None:
    for precision, rows in itertools.product(["int8", "uint8"], [0, 1, 150]):
        with named_case(precision, rows):
            values = embeddings(rows)
            ranges = np.stack([np.full(21, -0.5), np.full(21, 0.75)])
            ours = quantized(values, precision, ranges)
            assert_same_bytes(ours, quantized_by_them(values, precision, ranges))
            if rows > 1:
                assert {int(ours.min()), int(ours.max())} == ({-128, 127} if precision == "int8" else {0, 255})


def test_float16_is_rounded_and_refuses_what_it_cannot_hold() -> None:
    assert_same_bytes(quantized(embeddings(), "float16"), embeddings().astype(np.float16))
    with pytest.raises(InputError, match=r"magnitude 100000; float16 holds at most 65504"):
        quantized(np.array([[1.0, -1e5]], np.float32), "float16")


@pytest.mark.parametrize(
    ("precision", "ranges", "message"),
    [
        ("int4", None, r"precision is 'int4'; it must be one of 'float32', 'float16', 'int8'"),
        ("int8", None, r"A single embedding has no ranges to quantise to int8\.\nQuantise several"),
        ("uint8", np.zeros((2, 20)), r"ranges has the shape \[2, 20\]; it must be \[2, 21\]"),
    ],
)
def test_what_cannot_be_quantised_is_refused(precision: str, ranges: Array | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        quantized(embeddings(1), precision, ranges)


def test_normalised_embeddings_have_length_1_and_zeros_stay_zeros() -> None:
    torch = pytest.importorskip("torch")
    values = embeddings()
    values[3:5] *= [[0], [1e-8]]
    lengths = np.linalg.norm(normalized(values), axis=1)
    np.testing.assert_allclose(lengths, np.arange(150) != 3, rtol=1e-6)
    theirs = torch.nn.functional.normalize(torch.from_numpy(values), dim=-1).numpy()
    np.testing.assert_allclose(normalized(values), theirs, rtol=5e-7)
    np.testing.assert_array_equal(normalized(values[0]), normalized(values)[0])
    assert normalized(values).dtype == np.float32


def test_truncated_embeddings_keep_the_first_dimensions() -> None:
    values = embeddings()
    np.testing.assert_array_equal(truncated(values, 5), values[:, :5])
    np.testing.assert_array_equal(truncated(values[0], 21), values[0])
    assert truncated(values, None) is values


def test_truncating_to_dimensions_that_there_are_not_is_refused() -> None:
    for dimensions in (0, 22):
        message = rf"truncated to {dimensions} dimensions; these have 21\.\nChoose 1 to 21\."
        with pytest.raises(InputError, match=message):
            truncated(embeddings(), dimensions)
