"""Graph passes: what each finds, changes and refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

import hdexport.graph.passes.lay_out_weights
from hdexport.graph.passes.attach_functions import AttachFunctions
from hdexport.graph.passes.downcast_layer_norms import DowncastLayerNorms
from hdexport.graph.passes.lay_out_weights import LayOutWeights
from hdexport.graph.passes.upcast_to_float32 import UpcastToFloat32
from hdexport.lowering.nodes import operator_nodes
from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION
from hdplugins.attention.function_bodies import FunctionBodies
from hdplugins.attention.relative import onnx_functions
from hdruntime.errors import ExportError

HALF = {"float16": (ir.DataType.FLOAT16, np.float16), "bfloat16": (ir.DataType.BFLOAT16, ml_dtypes.bfloat16)}


def attention_model(*arities: int) -> ir.Model:
    """A graph with an attention of each number of inputs, and one node of another domain."""
    inputs = [ir.Value(name=f"input_{index}", type=ir.TensorType(ir.DataType.FLOAT)) for index in range(8)]
    attributes = {"causal": 0, "reach": 0, "scale": 1.0}
    nodes = [ir.node("RelativeAttention", inputs[:arity], attributes, domain=ONNX_DOMAIN) for arity in arities]
    nodes.append(ir.node("Identity", [inputs[0]]))
    outputs = [node.outputs[0] for node in nodes]
    return ir.Model(ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 20}), ir_version=10)


def test_nodes_of_our_domain_are_found_in_order() -> None:
    model = attention_model(7, 7, 7)
    nodes = operator_nodes(model)
    assert nodes == list(model.graph)[:3]
    assert operator_nodes(model, "RelativeAttention") == nodes
    assert operator_nodes(model, "OtherAttention") == []


@pytest.mark.parametrize("arity", [7, 8])
def test_a_body_of_the_nodes_arity_is_attached_once(arity: int) -> None:
    model = attention_model(arity, arity)
    assert AttachFunctions()(model).modified
    ((key, function),) = model.functions.items()
    assert key[0] == ONNX_DOMAIN
    assert key[1].startswith("RelativeAttention")
    assert len(function.inputs) == arity
    assert model.graph.opset_imports[ONNX_DOMAIN] == ONNX_DOMAIN_VERSION


def test_a_graph_without_our_nodes_gets_no_body() -> None:
    model = attention_model()
    assert not AttachFunctions()(model).modified
    assert not model.functions


def test_nodes_that_need_two_bodies_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours have other names for other numbers of inputs; those of another package may not."""
    original = onnx_functions.function_bodies

    def of_one_name(*described: Any) -> FunctionBodies:
        return replace(original(*described), suffix="")

    monkeypatch.setattr(onnx_functions, "function_bodies", of_one_name)
    with pytest.raises(ExportError, match="RelativeAttention have 7 and 8 inputs, for which one body"):
        AttachFunctions()(attention_model(7, 8))


def half_model(dtype: str) -> ir.Model:
    """(x * weight + weight) cast to half and back, with a half constant in a branch that uses the weight too."""
    kind, numpy_type = HALF[dtype]
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([3]))
    condition = ir.Value(name="condition", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    weight = ir.Value(name="weight", type=ir.TensorType(kind), shape=ir.Shape([3]))
    weight.const_value = ir.tensor(np.array([1.5, -2, 0.25], numpy_type), name="weight")
    kept = ir.Value(name="kept", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([3]))
    kept.const_value = ir.tensor(np.array([1, 2, 3], np.float32), name="kept")

    def half_node(op_type: str, inputs: list[ir.Value | None], attributes: dict | None = None) -> ir.Node:
        node = ir.node(op_type, inputs, attributes)
        node.outputs[0].dtype, node.outputs[0].shape = kind, ir.Shape([3])
        return node

    cast = half_node("Cast", [x], {"to": int(kind)})
    product = half_node("Mul", [cast.outputs[0], weight])
    branches = {}
    for name, op_type in (("then_branch", "Add"), ("else_branch", "Sub")):
        constant = half_node("Constant", [], {"value": ir.tensor(np.full(3, 0.5, numpy_type), name=f"{name}_half")})
        inner = half_node(op_type, [weight, constant.outputs[0]])
        inner.outputs[0].name, constant.outputs[0].name = f"{name}_result", f"{name}_constant"
        branches[name] = ir.AttrGraph(name, ir.Graph([], [inner.outputs[0]], nodes=[constant, inner], name=name))
    choice = half_node("If", [condition], branches)
    total = half_node("Add", [product.outputs[0], choice.outputs[0]])
    back = ir.node("Cast", [total.outputs[0]], {"to": int(ir.DataType.FLOAT)})
    result = ir.node("Add", [back.outputs[0], kept])
    for node in (back, result):
        node.outputs[0].dtype, node.outputs[0].shape = ir.DataType.FLOAT, ir.Shape([3])
    nodes = [cast, product, choice, total, back, result]
    graph = ir.Graph(
        [x, condition],
        [result.outputs[0]],
        nodes=nodes,
        initializers=[weight, kept],
        opset_imports={"": 20},
        name="half",
    )
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("dtype", HALF)
def test_widening_leaves_no_half_value_and_every_weight_as_it_is_stored(dtype: str) -> None:
    model = half_model(dtype)
    stored = model.graph.initializers["weight"].const_value
    assert UpcastToFloat32()(model).modified
    half = [kind for kind, _ in HALF.values()]
    assert not [value for node in model.graph.all_nodes() for value in node.outputs if value.dtype in half]
    assert model.graph.initializers["weight"].const_value is stored
    assert model.graph.initializers["weight"].dtype is HALF[dtype][0]


@pytest.mark.parametrize("condition", [True, False])
@pytest.mark.parametrize("dtype", HALF)
def test_a_widened_graph_computes_in_float32(dtype: str, condition: bool) -> None:
    model = half_model(dtype)
    UpcastToFloat32()(model)
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
    x = np.array([1.0009765, 3.1415927, 1e5], np.float32)
    (got,) = session.run(None, {"x": x, "condition": np.array(condition)})
    weight = np.array([1.5, -2, 0.25], np.float32)
    chosen = weight + np.float32(0.5) if condition else weight - np.float32(0.5)
    np.testing.assert_array_equal(got, x * weight + chosen + np.array([1, 2, 3], np.float32))


@pytest.mark.parametrize("dtype", HALF)
def test_of_a_table_only_the_rows_that_are_read_are_widened(dtype: str) -> None:
    kind, numpy_type = HALF[dtype]
    values = np.arange(12).reshape(4, 3).astype(numpy_type)
    table = ir.Value(name="table", type=ir.TensorType(kind), shape=ir.Shape([4, 3]), const_value=ir.tensor(values))
    ids = ir.Value(name="ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([2]))
    rows = ir.node("Gather", [table, ids])
    logits = ir.node("MatMul", [rows.outputs[0], ir.node("Transpose", [table]).outputs[0]])
    transposed = logits.inputs[1].producer()
    for node in (rows, transposed, logits):
        node.outputs[0].type = ir.TensorType(kind)
    graph = ir.Graph(
        [ids],
        [rows.outputs[0], logits.outputs[0]],
        nodes=[rows, transposed, logits],
        initializers=[table],
        opset_imports={"": 20},
        name="tied",
    )
    model = ir.Model(graph, ir_version=10)
    assert UpcastToFloat32()(model).modified
    assert [node.op_type for node in graph if node.inputs[0] is table] == ["Cast", "Gather"]
    assert rows.outputs[0].dtype is kind
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
    got, products = session.run(None, {"ids": np.array([3, 0])})
    expected = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert got.dtype == products.dtype == np.float32
    np.testing.assert_array_equal(got, expected[[3, 0]])
    np.testing.assert_array_equal(products, expected[[3, 0]] @ expected.T)


def test_a_float32_graph_is_left_as_it_is() -> None:
    model = attention_model(7)
    before = ir.serde.serialize_model(model).SerializeToString(deterministic=True)
    assert not UpcastToFloat32()(model).modified
    assert ir.serde.serialize_model(model).SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("slice_bytes", [1, 20, 2**20])
def test_weights_that_are_views_are_written_as_they_are(slice_bytes: int, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hdexport.graph.passes.lay_out_weights, "_SLICE_BYTES", slice_bytes)
    numbers = np.arange(15, dtype=np.float32).reshape(3, 5)
    arrays = {
        "whole": numbers,
        "transposed": numbers.T,
        "half": numbers.astype(ml_dtypes.bfloat16).T,
        "three axes": np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
        "one column": numbers[:, 1],
    }
    values = [ir.Value(name=name, const_value=ir.Tensor(array, name=name)) for name, array in arrays.items()]
    model = ir.Model(ir.Graph([], [], nodes=[], initializers=values), ir_version=10)
    before = {name: value.const_value for name, value in model.graph.initializers.items()}
    assert LayOutWeights()(model).modified
    assert model.graph.initializers["whole"].const_value is before["whole"]
    ir.save(model, tmp_path / "model.onnx", external_data="weights", size_threshold_bytes=0)
    read = ir.load(tmp_path / "model.onnx").graph.initializers
    for name, array in arrays.items():
        assert read[name].const_value.dtype == before[name].dtype
        np.testing.assert_array_equal(read[name].const_value.numpy(), array)


_NORM = """<ir_version: 10, opset_import: ["": 20]>
norm ({type}[2, 3, 8] x, float[8] scale, float[8] bias) => ({type}[2, 3, 8] y, {type}[2, 3, 8] z{also}) {{
    wide = Cast <to = 1> (x)
    normal, mean = LayerNormalization <axis = -1> (wide, scale, bias)
    y = Cast <to = {number}> (normal)
    doubled = Cast <to = {number}> (normal)
    z = Add (doubled, doubled)
}}"""


def test_a_normalisation_of_float16_loses_its_casts_and_no_name() -> None:
    model = ir.from_onnx_text(_NORM.format(type="float16", number=10, also=""))
    assert DowncastLayerNorms()(model).modified
    ir.passes.common.RemoveUnusedNodesPass()(model)
    assert [node.op_type for node in model.graph] == ["Cast", "Cast", "LayerNormalization", "Add"]
    assert [value.name for value in model.graph.outputs] == ["y", "z"]
    generator = np.random.default_rng(0)
    x = (100 + 3 * generator.standard_normal((2, 3, 8))).astype(np.float16)
    scale, bias = generator.standard_normal((2, 8), dtype=np.float32)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    y, z = session.run(None, {"x": x, "scale": scale, "bias": bias})
    exact = x.astype(np.float64)
    exact = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-5)
    # A rounding of the factor, one of the addend, and one of the result.
    allowed = 2.0**-11 * (2 * np.abs(exact * scale) + 2 * np.abs(bias)) + 1e-4
    assert (np.abs(y - (exact * scale + bias)) <= allowed).all()
    assert (z == 2 * y).all()
    # Normalised in float16, whose steps are 1/16 at 100, the result would be another.
    coarse = x - x.mean(-1, keepdims=True, dtype=np.float16)
    coarse = coarse / np.sqrt((coarse * coarse).mean(-1, keepdims=True, dtype=np.float16))
    assert not (np.abs(coarse * scale + bias - (exact * scale + bias)) <= allowed).all()


@pytest.mark.parametrize(
    ("type_", "number", "also"),
    [
        ("float", 1, ""),
        ("bfloat16", 16, ""),
        ("float16", 10, ", float[2, 3, 8] normal"),
        ("float16", 10, ", float mean"),
    ],
    ids=["float32", "bfloat16", "read in float32", "its mean is read"],
)
def test_other_normalisations_stay_as_they_are(type_: str, number: int, also: str) -> None:
    model = ir.from_onnx_text(_NORM.format(type=type_, number=number, also=also))
    before = ir.to_proto(model)
    assert not DowncastLayerNorms()(model).modified
    assert ir.to_proto(model) == before
