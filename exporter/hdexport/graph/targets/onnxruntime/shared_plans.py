"""One plan of keys for all layers that would make equal plans, where compiled kernels compute them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdexport.lowering.kernel_nodes import give_plan, kernel_nodes, nodes_of_equal_plans
from hdplugins.attention.plugin_face import PLAN, PlanUse

if TYPE_CHECKING:
    import onnx_ir

_NO_PLAN = "no_plan"


def share_plans(model: onnx_ir.Model) -> int:
    """Let the first node of those with equal plans give its plan to the others, in place; returns how many take one.

    Without kernels the graph computes the same: the body of a node that gives a plan gives an empty one, which the
    others' bodies do not read.
    """
    taking = 0
    for first, *others in nodes_of_equal_plans(kernel_nodes(model)):
        give_plan(first, others)
        for node in (first, *others):
            _use_plan(model, node, PlanUse.GIVES if node is first else PlanUse.TAKES)
        taking += len(others)
    return taking


def _use_plan(model: onnx_ir.Model, node: onnx_ir.Node, use: PlanUse) -> None:
    """Give a node the type of those that use a plan so, and the type a body."""
    import onnx_ir as ir

    body = model.functions[node.op_identifier()].clone()
    node.op_type = body.name = node.op_type + use.ending
    if use is PlanUse.TAKES:
        body.inputs.append(ir.Value(name=PLAN))
    else:
        nothing = ir.tensor([], ir.DataType.INT32)
        constant = ir.node("Constant", [], {"value": nothing}, outputs=[ir.Value(name=_NO_PLAN)])
        body.append(constant)
        body.outputs.append(constant.outputs[0])
    model.functions[node.op_identifier()] = body
