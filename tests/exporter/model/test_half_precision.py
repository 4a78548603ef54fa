"""Half precision is in the graph's types; what must be float32 is, and nothing is infinite."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
import pytest
import torch

from hdexport.model.half_precision import cast_model
from hdruntime.bundle.manifest import Dtype
from hdruntime.errors import ExportError
from support.function_bodies import nodes_within
from support.grids import nightly_unless

HALF = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
CASES = [
    # A head of ours, the family with a bias of its scores, each precision; computed positions: test_modernbert.py.
    *[
        nightly_unless(case[0] != "modernbert", *case)
        for case in (
            ("bert", "sentence-similarity", "float16"),
            ("mpnet", "feature-extraction", "bfloat16"),
            ("modernbert", "text-classification", "float16"),
            ("distilbert", "feature-extraction", "float32"),
        )
    ]
]


@pytest.fixture
def bundle(tiny_bundles, model_type: str, task: str, precision: str) -> Any:
    return tiny_bundles(model_type, task, precision)


each_bundle = pytest.mark.parametrize(("model_type", "task", "precision"), CASES)


def inferred(bundle: Any) -> tuple[onnx.ModelProto, dict[str, int]]:
    """The portable graph with the bodies of its functions in place, and the type of every value, in loops as well."""
    model = onnx.inliner.inline_local_functions(onnx.load(bundle.path / "model.onnx"))
    model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    loops = [
        attribute.g for node in nodes_within(model.graph) for attribute in node.attribute if attribute.HasField("g")
    ]
    values = [value for graph in (model.graph, *loops) for value in (*graph.input, *graph.output, *graph.value_info)]
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    return model, types | {tensor.name: tensor.data_type for tensor in model.graph.initializer}


def constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    found = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    bodies = [model.graph.node, *(function.node for function in model.functions)]
    for node in (node for body in bodies for node in body):
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                found[f"{node.name}.{attribute.name}"] = onnx.numpy_helper.to_array(attribute.t)
            elif attribute.type in (onnx.AttributeProto.FLOAT, onnx.AttributeProto.FLOATS):
                found[f"{node.name}.{attribute.name}"] = np.array([attribute.f, *attribute.floats])
    return found


@each_bundle
def test_weights_are_half_but_for_normalisations_and_frequencies(bundle, precision: str) -> None:
    model = bundle.graph
    normalisations = {
        value.name for node in model.graph if node.op_type == "LayerNormalization" for value in node.inputs[1:]
    }
    floats = {
        name: value.dtype
        for name, value in model.graph.initializers.items()
        if value.dtype in (ir.DataType.FLOAT, *HALF.values()) and value.const_value.size > 1
    }
    for name, dtype in floats.items():
        kept = name in normalisations or name.endswith((".cosines", ".sines")) or precision == "float32"
        assert dtype == (ir.DataType.FLOAT if kept else HALF[precision]), name
    assert len(floats) >= 20


@each_bundle
def test_normalisation_and_softmax_compute_in_float32(bundle) -> None:
    model, types = inferred(bundle)
    islands = [node for node in nodes_within(model.graph) if node.op_type in ("LayerNormalization", "Softmax")]
    assert {node.op_type for node in islands} == {"LayerNormalization", "Softmax"}
    for node in islands:
        assert types[node.input[0]] == onnx.TensorProto.FLOAT, node.name


def test_pooling_computes_in_float32(tiny_bundles) -> None:
    model, types = inferred(tiny_bundles("bert", "sentence-similarity", "float16"))
    sums = [node for node in model.graph.node if node.op_type in ("ReduceSum", "ReduceL2", "Div")]
    assert len(sums) >= 4
    assert {types[node.input[0]] for node in sums} <= {onnx.TensorProto.FLOAT}


@each_bundle
def test_products_with_weights_are_half(bundle, precision: str) -> None:
    model, types = inferred(bundle)
    products = [node for node in model.graph.node if node.op_type in ("MatMul", "Gemm")]
    assert {types[node.input[0]] for node in products} == {int(HALF.get(precision, ir.DataType.FLOAT))}


@each_bundle
def test_outputs_are_float32_and_inputs_int64(bundle) -> None:
    for model in (bundle.graph, bundle.cpu_graph):
        assert {value.dtype for value in model.graph.inputs} == {ir.DataType.INT64}
        assert {value.dtype for value in model.graph.outputs} == {ir.DataType.FLOAT}


@each_bundle
@pytest.mark.parametrize("file", ["model.onnx", "onnxruntime_cpu.onnx"])
def test_the_checker_passes_and_no_constant_is_infinite(bundle, file: str) -> None:
    onnx.checker.check_model(bundle.path / file, full_check=True)
    found = constants(onnx.load(bundle.path / file))
    assert len(found) > 20
    assert [name for name, value in found.items() if not np.isfinite(value.astype(np.float64)).all()] == []


@pytest.mark.parametrize(("model_type", "task", "precision"), [case for case in CASES if case.values[2] != "float32"])
def test_the_lowered_graph_computes_in_float32_from_the_same_weights(bundle) -> None:
    half = set(HALF.values())
    for node in bundle.cpu_graph.graph.all_nodes():
        if node.op_type in ("Gather", "Slice") and node.inputs[0].const_value is not None:
            # Rows of a table, of which no copy in float32 is held.
            assert {use.node.op_type for use in node.outputs[0].uses()} == {"Cast"} or node.outputs[0].dtype not in half
        else:
            assert not {value.dtype for value in node.outputs} & half, node
    shared = {"model.onnx.data"}
    for model in (bundle.graph, bundle.cpu_graph):
        tensors = [value.const_value for value in model.graph.initializers.values()]
        assert {str(tensor.location) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)} == shared
    assert bundle.path.joinpath("onnxruntime_cpu.onnx").stat().st_size < 150_000


def test_a_weight_outside_float16_is_named_and_fits_bfloat16() -> None:
    """That nothing is written is tested with the command."""
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with torch.no_grad():
        layer[0].weight[0, 0] = 1e5
    message = r"1 weights? do(es)? not fit float16.*0\.weight .*100000.*\n.*precision='bfloat16'"
    with pytest.raises(ExportError, match=message):
        cast_model(layer, "float16")
    cast_model(layer, "bfloat16")
    assert layer[0].weight[0, 0] == torch.tensor(1e5, dtype=torch.bfloat16)


def test_a_weight_that_is_not_finite_fits_no_half_precision() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with torch.no_grad():
        layer[0].weight[1, 2] = float("nan")
    with pytest.raises(ExportError, match=r"0\.weight"):
        cast_model(layer, "bfloat16")


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_cast_layer_normalisation_keeps_fp32_weights_and_the_neighbours_type(precision: Dtype) -> None:
    dtype = getattr(torch, precision)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    weights = model[1].weight.detach().clone()
    cast_model(model, precision)
    assert model[0].weight.dtype == dtype
    assert model[1].weight.dtype == torch.float32
    assert torch.equal(model[1].weight, weights)
    hidden_states = torch.full((1, 8), 300.0, dtype=dtype) + torch.arange(8)
    normalised = model[1](hidden_states.to(dtype))
    assert normalised.dtype == dtype
    # The squares of 300 are outside float16: computed in float32 they do not matter.
    assert normalised.isfinite().all()


def test_what_is_computed_and_not_learned_keeps_its_type_and_bits() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Identity())
    model[1].register_buffer("frequencies", torch.tensor([1 / 3, 1e-7]), persistent=False)
    model[1].register_buffer("ids", torch.arange(3))
    cast_model(model, "float16")
    assert model[0].weight.dtype == torch.float16
    assert torch.equal(model[1].frequencies, torch.tensor([1 / 3, 1e-7]))
    assert model[1].ids.dtype == torch.int64
