"""Which outputs a graph for a GPU makes 0 at padding; `tests/runtime/backends/test_onnxruntime_cuda.py` has answers."""

from __future__ import annotations

import json

import onnx
import onnx_ir as ir
import pytest

from hdexport.graph.passes.zero_padding import ZeroPadding
from hdruntime.backends.onnxruntime import ZEROED_OUTPUTS
from support.onnx_models import parsed_model

NARROW = "narrow = Cast<to: int = 10>(states)"
POOL = "axis = Constant<value_ints = [1]>() vector = ReduceMax<keepdims = 0>"


def graph_of(nodes: str, *, width: int = 8, mask: str = "attention_mask") -> ir.Model:
    """`states`, float32 [batch, tokens, width], become `answer`, and perhaps `vector`, [batch, width]."""
    outputs = {"answer": f"float[batch, tokens, {width}]"}
    if "vector" in nodes:
        outputs["vector"] = f"float[batch, {width}]"
    inputs = {"states": outputs["answer"], mask: "int64[batch, tokens]"}
    model = parsed_model(inputs, outputs, nodes)
    return ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(model))


@pytest.mark.parametrize("nodes", ["answer = Neg(states)", f"{NARROW} answer = Cast<to: int = 1>(narrow)"])
def test_outputs_of_tokens_are_zeroed_and_keep_their_names(nodes: str) -> None:
    model = graph_of(nodes, width=4096)
    zeroing = ZeroPadding()
    zeroing(model)
    assert zeroing.zeroed == ["answer"]
    assert json.loads(model.metadata_props[ZEROED_OUTPUTS]) == ["answer"]
    (output,) = model.graph.outputs
    assert output.producer().op_type == "Where"  # type: ignore[union-attr]
    assert (output.name, str(output.dtype), str(output.shape)) == ("answer", "FLOAT", "[batch,tokens,4096]")
    onnx.checker.check_model(ir.serde.serialize_model(model), full_check=True)


@pytest.mark.parametrize(
    ("nodes", "options"),
    [
        ("answer = Neg(states)", {"width": 4097}),
        (f"answer = Neg(states) {POOL}(answer, axis)", {}),
        (f"{NARROW} answer = Cast<to: int = 1>(narrow) wide = Cast<to: int = 1>(narrow) {POOL}(wide, axis)", {}),
        ("answer = Neg(states)", {"mask": "another_mask"}),
    ],
    ids=["wide", "pooled", "pooled before a cast", "no mask"],
)
def test_other_graphs_stay_as_they_are(nodes: str, options: dict[str, object]) -> None:
    """Those whose outputs are as large as all else, or of tokens whose vectors make one of the text."""
    model = graph_of(nodes, **options)  # type: ignore[arg-type]
    before = ir.serde.serialize_model(model)
    assert not ZeroPadding()(model).modified
    assert ir.serde.serialize_model(model) == before
