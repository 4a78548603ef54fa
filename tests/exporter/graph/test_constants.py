"""No graph has a constant of the attribute value_float: GraphSurgeon, Polygraphy and onnxslim make doubles of those."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_graphsurgeon
import onnx_ir as ir
import pytest
from polygraphy.backend.onnx import fold_constants

from hdexport.families import SUPPORTED_MODEL_TYPES
from hdexport.graph.targets.onnxruntime.cpu import lower_for_onnxruntime_cpu
from hdexport.graph.targets.onnxruntime.cuda import lower_for_onnxruntime_cuda
from hdexport.graph.targets.openvino.lowering import lower_for_openvino
from hdexport.graph.targets.tensorrt.lowering import AttentionImpl, tensorrt_graph
from support.answers import inputs_of
from support.attention_graphs import attention_model
from support.attention_layers import Layer
from support.comparators import assert_close, named_case
from support.described_operators import NODES
from support.function_bodies import new_session
from support.grids import EVERY_RUN_TYPES, nightly_unless
from support.tiny_models import VOCAB_SIZE


def of_value_float(model: ir.Model) -> list[str]:
    """Outputs of such constants; those of a function's attributes have a number once the function is inlined, and are
    cast there."""
    graphs = [model.graph, *model.functions.values()]
    return [
        str(node.outputs[0].name)
        for graph in graphs
        for node in graph.all_nodes()
        if node.op_type == "Constant"
        for name in ("value_float", "value_floats")
        if name in node.attributes and not node.attributes[name].is_ref()
    ]


def graphs_of(portable: ir.Model) -> Iterator[tuple[str, ir.Model]]:
    yield "portable", portable
    yield "CPU", lower_for_onnxruntime_cpu(portable.clone())
    for_gpu = portable.clone()
    lower_for_onnxruntime_cuda(for_gpu)
    yield "CUDA", for_gpu
    for padded in (True, False):
        for_openvino = portable.clone()
        lower_for_openvino(for_openvino, padded=padded)
        yield f"OpenVINO padded={padded}", for_openvino
    for dtype in ("float32", "float16"):
        yield f"TensorRT {dtype}", tensorrt_graph(portable, dtype=dtype, attention_impl=AttentionImpl.NATIVE)


@pytest.mark.parametrize(
    "node",
    [nightly_unless(node == nodes[0], node) for nodes in NODES.values() for node in nodes],
    ids=lambda node: f"{node.operator.name} {node}",
)
def test_lowerings_write_numbers_as_tensors(node: Layer) -> None:
    for name, graph in graphs_of(attention_model(node)):
        with named_case(name):
            assert of_value_float(graph) == []


@pytest.mark.parametrize(
    "model_type", [nightly_unless(name in EVERY_RUN_TYPES, name) for name in SUPPORTED_MODEL_TYPES]
)
def test_graphs_of_a_bundle_have_numbers_as_tensors(tiny_bundles, model_type: str) -> None:
    bundle = tiny_bundles(model_type)
    for graph in bundle.manifest.graphs:
        with named_case(graph.file):
            assert of_value_float(ir.load(bundle.path / graph.file)) == []


@pytest.mark.pinned
@pytest.mark.parametrize("model_type", ["bert", "longformer", "t5"])
def test_the_graph_of_a_bundle_answers_the_same_when_its_constants_are_folded(tiny_bundles, model_type: str) -> None:
    bundle = tiny_bundles(model_type)
    model = onnx.load(bundle.path / "model.onnx")
    ids = np.random.default_rng(0).integers(4, VOCAB_SIZE, (2, 70))
    feeds = inputs_of(bundle, ids, (np.arange(70) < [[70], [31]]).astype(np.int64))
    (expected,) = bundle.portable(**feeds).values()
    surgeon = onnx_graphsurgeon.import_onnx(copy.deepcopy(model))
    for name, folded in {
        "Polygraphy": fold_constants(copy.deepcopy(model)),
        "GraphSurgeon": onnx_graphsurgeon.export_onnx(surgeon.fold_constants().cleanup()),
    }.items():
        with named_case(name):
            (got,) = new_session(folded).run(None, feeds)
            assert_close(got, expected, atol=1e-5)


def test_a_number_that_is_an_attribute_is_found() -> None:
    number = ir.node("Constant", [], {"value_float": 1.0})
    assert of_value_float(ir.Model(ir.Graph([], number.outputs, nodes=[number]), ir_version=10)) == ["val_0"]
