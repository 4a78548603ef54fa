"""Passes run in order, log what they changed, and their errors reach the caller as they are."""

from __future__ import annotations

import logging

import onnx
import onnx_ir as ir
import pytest

from hdexport.graph.passes.graph_pass import run_passes
from hdexport.graph.passes.pool_in_blocks import check_pools_logits
from hdruntime.errors import ExportError
from support.onnx_models import parsed_model

AXES = "axes = Constant<value_ints = [1]>()"


class Append(ir.passes.InPlacePass):
    """Appends a node, or nothing for an empty operator type."""

    def __init__(self, op_type: str) -> None:
        self._op_type = op_type

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        if self._op_type:
            model.graph.append(ir.node(self._op_type, [model.graph.inputs[0]]))
        return ir.passes.PassResult(model, modified=bool(self._op_type))


class Reject(ir.passes.InPlacePass):
    """Rejects every model."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        raise ExportError("no", hint="Change it.")


def negated() -> ir.Model:
    return ir.serde.deserialize_model(parsed_model({"x": "float[n]"}, {"y": "float[n]"}, "y = Neg(x)"))


def test_passes_run_in_order_and_say_what_changed(caplog: pytest.LogCaptureFixture) -> None:
    model = negated()
    with caplog.at_level(logging.DEBUG, logger="hdexport.graph.passes.graph_pass"):
        assert run_passes(model, [Append("Abs"), Append(""), Append("Exp")])
    assert [node.op_type for node in model.graph] == ["Neg", "Abs", "Exp"]
    assert [record.message for record in caplog.records] == [
        "pass Append changed the graph",
        "pass Append changed nothing",
        "pass Append changed the graph",
    ]
    assert not run_passes(model, [Append("")])
    assert not run_passes(model, [])


def test_an_error_of_a_pass_is_the_caller_s() -> None:
    with pytest.raises(ExportError, match="no") as raised:
        run_passes(negated(), [Append("Abs"), Reject()])
    assert raised.value.hint == "Change it."


@pytest.mark.parametrize(
    ("nodes", "miss"),
    [
        ("y = Neg(x)", "there is no maximum or sum over tokens"),
        (
            "h = Softmax(x) axes = Constant<value_ints = [1]>() y = ReduceMax<keepdims = 0>(h, axes)",
            "Softmax.* is before",
        ),
    ],
    ids=["no pool", "no linear layer"],
)
def test_a_graph_that_pools_no_logits_stops_the_export_with_the_nearest_miss(nodes: str, miss: str) -> None:
    outputs = {"y": "float[batch, tokens, 8]" if nodes.startswith("y") else "float[batch, 8]"}
    proto = parsed_model({"x": "float[batch, tokens, 8]"}, outputs, nodes)
    model = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(proto))
    with pytest.raises(ExportError, match=rf"pools no linear layer's output.*nearest miss: .*{miss}"):
        check_pools_logits(model, model_type="bert")
