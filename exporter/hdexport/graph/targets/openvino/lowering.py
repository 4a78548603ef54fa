"""The graphs that OpenVINO runs fastest on a CPU.

OpenVINO knows neither hdexport's domain nor functions, so the graphs have none: some attentions have implementations
that OpenVINO fuses, the others have their batched bodies, inlined. OpenVINO reads no Scan whose body reads values of
the graph around it; the Scans of the bodies become loops. The graphs compute in float32, whatever the bundle's dtype:
OpenVINO chooses the precision when it loads them. The graphs read the portable graph's weights.

In half precision, OpenVINO rounds whatever is a float, so what counts tokens must be an integer: see
`hdruntime.backends.bundle_runner.needs_float32` for the one operator that counts in floats.
"""

from __future__ import annotations

import logging

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, RemoveUnusedNodesPass

from hdexport.attention.registry import lowerings_of
from hdexport.graph.passes.graph_pass import run_passes
from hdexport.graph.passes.pool_in_blocks import PoolInBlocks
from hdexport.graph.passes.upcast_to_float32 import UpcastToFloat32
from hdexport.lowering.lowering import SharedParts
from hdexport.lowering.nodes import operator_nodes
from hdexport.lowering.openvino_functions import OPSET, OpenVinoLowering
from hdplugins.op_builder import OpBuilder

logger = logging.getLogger(__name__)


def lower_for_openvino(model: ir.Model, *, padded: bool) -> bool:
    """Lower a portable graph in place; returns whether the graph depends on `padded`.

    Without `padded`, no batch has padding, and dense attention needs no mask.
    """
    lowering = LowerAttentionToOpenVino(padded=padded)
    passes = [PoolInBlocks(), UpcastToFloat32(), lowering, InlineFunctions(), ScansToLoops(), RemoveUnusedNodesPass()]
    run_passes(model, passes)
    return lowering.depends_on_padding


class LowerAttentionToOpenVino(ir.passes.InPlacePass):
    """Replace the nodes of operators that have an `OpenVinoLowering` in a float32 graph.

    Args:
        padded: whether batches may have padding.

    Attributes:
        depends_on_padding: whether the graph depends on `padded`.
    """

    def __init__(self, *, padded: bool) -> None:
        self._padded = padded
        self.depends_on_padding = False

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        parts = SharedParts(model, padded=self._padded)
        nodes = [(node, each) for node, each in lowerings_of(model) if isinstance(each, OpenVinoLowering)]
        for node, lowering in nodes:
            self.depends_on_padding |= lowering.for_openvino(node, parts)
        if nodes:
            logger.info("%d attentions are fused in OpenVINO", len(nodes))
        return ir.passes.PassResult(model, modified=bool(nodes))


class InlineFunctions(ir.passes.InPlacePass):
    """Inline all functions.

    1. Functions and graph get the opset of OpenVINO's functions: the bodies' operators mean the same in each opset from
       their own opset on, and a graph has one opset.
    2. Constants of inlined attributes become float32 tensors: tools that fold constants make doubles of them.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        for function in model.functions.values():
            function.opset_imports[""] = OPSET  # 1
        model.graph.opset_imports[""] = OPSET
        run_passes(model, [InlinePass()])
        for node in model.graph.all_nodes():
            if node.op_type == "Constant" and "value_float" in node.attributes:  # 2
                value = ir.tensor(node.attributes.pop("value_float").as_float(), ir.DataType.FLOAT)
                node.attributes["value"] = ir.AttrTensor("value", value)
        assert not operator_nodes(model)
        model.functions.clear()
        return ir.passes.PassResult(model, modified=True)


class ScansToLoops(ir.passes.InPlacePass):
    """Replace every Scan of a graph, also in branches and loops but not in functions, by a Loop.

    1. The body of the Loop gathers its element of each sequence, along axis 0, by the number of the step.
    2. The body returns the condition unchanged, before its other outputs.
    3. The length of the first sequence is the number of steps.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        scans = [node for node in model.graph.all_nodes() if node.op_type == "Scan" and not node.domain]
        for number, scan in enumerate(scans):
            _replace(scan, name=f"loop_{number}")
        if scans:
            logger.debug("%d Scans are loops", len(scans))
        return ir.passes.PassResult(model, modified=bool(scans))


def _replace(scan: ir.Node, *, name: str) -> None:
    assert set(scan.attributes) == {"body", "num_scan_inputs"}, "axes and directions have their defaults"
    graph = scan.graph
    assert graph is not None
    body = scan.attributes.pop("body").as_graph()
    states = len(scan.inputs) - scan.attributes["num_scan_inputs"].as_int()
    number = ir.val(f"{name}_number", ir.DataType.INT64, [])
    condition = ir.val(f"{name}_condition", ir.DataType.BOOL, [])

    op, sequences = OpBuilder.before(body[0]), list(scan.inputs)[states:]
    for element, sequence in zip(list(body.inputs)[states:], sequences, strict=True):  # 1
        gathered = ir.Value(name=element.name, type=element.type, shape=element.shape)
        ir.convenience.replace_all_uses_with(element, gathered)
        op.Gather(sequence, number, axis=0, _outputs=[gathered])
    body.inputs[:] = [number, condition, *list(body.inputs)[:states]]
    unchanged = ir.val(f"{name}_condition_after", ir.DataType.BOOL, [])
    OpBuilder.append(body).Identity(condition, _outputs=[unchanged])
    body.outputs[:] = [unchanged, *body.outputs]  # 2

    op = OpBuilder.before(scan)
    steps = op.Squeeze(op.Shape(sequences[0], start=0, end=1))  # 3
    outputs = [ir.Value(type=output.type, shape=output.shape) for output in scan.outputs]
    op.Loop(steps, None, *list(scan.inputs)[:states], body=body, _outputs=outputs)
    # A body may end with an output of its Scan.
    ir.convenience.replace_all_uses_with(scan.outputs, outputs, replace_graph_outputs=True)
    graph.remove(scan, safe=True)
