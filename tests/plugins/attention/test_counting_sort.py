"""The sort of LSH attention's batched body, by itself, against NumPy's."""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx import TensorProto, helper
from onnx_ir import Value

from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION, ONNX_OPSET, Operator
from hdplugins.attention.function_bodies import operator_function
from hdplugins.attention.lsh.onnx_functions import counting_sort
from hdplugins.op_builder import OpBuilder
from support.function_bodies import new_session

OPERATOR = Operator(name="Sort", version=1, package=__name__, inputs=("numbers",), states=1)


@functools.cache
def sort_session(most: int) -> onnxruntime.InferenceSession:
    """A session whose outputs are rank and order, [2, rows, padded]."""

    def body(op: OpBuilder, numbers: Value) -> Value:
        padded = op.Squeeze(op.Shape(numbers, start=1))
        found = counting_sort(op, numbers, op.Range(0, padded, 1), padded, most=most)
        return op.Concat(*(op.Unsqueeze(value, [0]) for value in found), axis=0)

    proto = ir.serde.serialize_function(operator_function(OPERATOR, body, inputs=1))
    sorting, found = (
        helper.make_tensor_value_info(name, TensorProto.INT64, shape)
        for name, shape in (("numbers", ["rows", "padded"]), ("found", [2, "rows", "padded"]))
    )
    node = helper.make_node(proto.name, ["numbers"], ["found"], domain=ONNX_DOMAIN)
    graph = helper.make_graph([node], "sort", [sorting], [found])
    opsets = [helper.make_opsetid("", ONNX_OPSET), helper.make_opsetid(ONNX_DOMAIN, ONNX_DOMAIN_VERSION)]
    return new_session(helper.make_model(graph, functions=[proto], opset_imports=opsets, ir_version=10))


def assert_sorted(numbers: np.ndarray, most: int) -> None:
    ((rank, order),) = sort_session(most).run(None, {"numbers": numbers})
    expected = numbers.argsort(axis=1, kind="stable")
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(rank, expected.argsort(axis=1))


@settings(max_examples=120)
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
