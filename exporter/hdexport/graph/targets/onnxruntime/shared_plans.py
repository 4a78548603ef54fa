"""One plan of keys for all layers that would make equal plans, where compiled kernels compute them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdexport.lowering.kernel_nodes import give_plan, kernel_nodes, nodes_of_equal_plans
from hdexport.lowering.nodes import operator_of
from hdplugins.attention.plugin_face import GIVES_PLAN, PLAN

if TYPE_CHECKING:
    import onnx_ir

    from hdplugins import Operator

_NO_PLAN = "no_plan"


def share_plans(model: onnx_ir.Model) -> int:
    """Let the first node of those with equal plans give its plan to the others, in place; returns how many take one.

    Without kernels the graph computes the same: the body of a node that gives a plan gives an empty one, which other
    bodies do not read.
    """
    taking = 0
    for first, *others in nodes_of_equal_plans(kernel_nodes(model)):
        operator, function = operator_of(first), model.functions[first.op_identifier()]
        give_plan(first, others, place=len(operator.inputs))
        first.op_type += GIVES_PLAN
        model.functions[first.op_identifier()] = _giving(function, name=first.op_type)
        for node in others:
            _let_take(model.functions[node.op_identifier()], operator)
        taking += len(others)
    return taking


def _giving(function: onnx_ir.Function, *, name: str) -> onnx_ir.Function:
    """The function of a node that gives its plan."""
    import onnx_ir as ir

    giving = function.clone()
    giving.name = name
    nothing = ir.node("Constant", [], {"value": ir.tensor([], ir.DataType.INT32)}, outputs=[ir.Value(name=_NO_PLAN)])
    giving.append(nothing)
    giving.outputs.append(nothing.outputs[0])
    return giving


def _let_take(function: onnx_ir.Function, operator: Operator) -> None:
    """Give a function a plan as its last input, unless another node has done so."""
    import onnx_ir as ir

    names = (*operator.inputs, PLAN)
    function.inputs.extend(ir.Value(name=name) for name in names[len(function.inputs) :])
