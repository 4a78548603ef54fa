"""The sort of LSH attention's parallel body, by itself, against NumPy's."""

from __future__ import annotations

import functools

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx import TensorProto, helper

from hdplugins import ONNX_OPSET
from hdplugins.operators.lsh_attention.onnx_sort import counting_sort
from hdplugins.operators.onnx_text import nodes_of
from support.function_bodies import new_session

_GIVEN = """
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    zero_1d = Constant <value_ints = [0]> ()
    one_1d = Constant <value_ints = [1]> ()
    two_1d = Constant <value_ints = [2]> ()
    last_axis = Constant <value_ints = [-1]> ()
    padded_1d = Shape <start = 1, end = 2> (sorting)
    padded = Squeeze (padded_1d)
    places = Range (zero, padded, one)
"""


@functools.cache
def sort_session(most: int) -> onnxruntime.InferenceSession:
    nodes = nodes_of(_GIVEN + counting_sort(most), inputs=["sorting"], attributes=["scale"])
    sorting, *found = (
        helper.make_tensor_value_info(name, TensorProto.INT64, ["rows", "padded"])
        for name in ("sorting", "rank", "order")
    )
    graph = helper.make_graph(nodes, "sort", [sorting], found)
    return new_session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", ONNX_OPSET)], ir_version=10))


def assert_sorted(numbers: np.ndarray, most: int) -> None:
    rank, order = sort_session(most).run(None, {"sorting": numbers})
    expected = numbers.argsort(axis=1, kind="stable")
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(rank, expected.argsort(axis=1))


@settings(max_examples=120, deadline=None)
@given(data=st.data(), most=st.sampled_from([2, 3, 8, 48, 512]), rows=st.integers(1, 3), tokens=st.integers(1, 300))
def test_any_numbers_are_sorted_and_equal_ones_stay_in_order(
    data: st.DataObject, most: int, rows: int, tokens: int
) -> None:
    assert_sorted(data.draw(arrays(np.int64, (rows, tokens), elements=st.integers(0, most))), most)


@pytest.mark.parametrize("tokens", [4095, 4096, 4097, 7680, 7681, 16384, 20011])
def test_long_texts_are_sorted_beyond_what_a_topk_of_tensorrt_takes(tokens: int) -> None:
    generator, most = np.random.default_rng(tokens), 512
    few = np.minimum(generator.geometric(0.4, tokens), most)
    falling = np.arange(tokens)[::-1] * (most + 1) // tokens
    assert_sorted(np.stack([generator.integers(0, most + 1, tokens), few, falling, np.full(tokens, most)]), most)
