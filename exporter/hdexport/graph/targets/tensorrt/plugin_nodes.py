"""Operators that TensorRT runs by our plugins: their nodes, without a body."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdexport.lowering.kernel_nodes import give_plan, kernel_nodes, nodes_of_equal_plans, shapes_of_inputs
from hdexport.lowering.nodes import attributes_of, operator_nodes, operator_of
from hdplugins import ONNX_DOMAIN
from hdplugins.attention.plugin_face import PLAN_USE, PlanUse, face_of
from hdruntime.errors import ExportError

if TYPE_CHECKING:
    import onnx_ir

_NAMESPACE, _VERSION = "plugin_namespace", "plugin_version"
"""Attributes by which TensorRT's parser looks a plugin up."""

_MOST_INT32 = 2**31 - 1


def use_plugins(model: onnx_ir.Model, *, dtype: str) -> int:
    """Turn every operator with a plugin into a node of that plugin, in place, and drop the bodies; returns how many
    nodes.

    TensorRT's parser prefers a function body to a plugin, and the body's name to the operator's. `dtype` is that of the
    weights; a node without a kernel is an ExportError.
    """
    import onnx_ir as ir

    nodes = [node for node in kernel_nodes(model) if face_of(operator_of(node)).IS_PLUGIN]
    for node in nodes:
        _check(node, dtype)
        operator = operator_of(node)
        model.functions.pop(node.op_identifier(), None)
        node.op_type = operator.name
        node.attributes[_NAMESPACE] = ir.AttrString(_NAMESPACE, ONNX_DOMAIN)
        node.attributes[_VERSION] = ir.AttrString(_VERSION, str(operator.version))
    for first, *others in nodes_of_equal_plans(nodes):
        give_plan(first, others)
        for node in (first, *others):
            use = PlanUse.GIVES if node is first else PlanUse.TAKES
            node.attributes[PLAN_USE] = ir.AttrInt64(PLAN_USE, int(use))
    return len(nodes)


def plugin_nodes(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    """The plugin nodes of a lowered graph, in graph order."""
    return [node for node in operator_nodes(model) if _NAMESPACE in node.attributes]


def own_shapes(node: onnx_ir.Node) -> list[list[int]]:
    """The shapes of a plugin's inputs, without a plan behind them; see `shapes_of_inputs`."""
    return shapes_of_inputs(node, node.inputs[:-1] if plan_use_of(node) is PlanUse.TAKES else node.inputs)


def plan_use_of(node: onnx_ir.Node) -> PlanUse:
    """Where a plugin's node finds its plan."""
    attribute = node.attributes.get(PLAN_USE)
    return PlanUse.OWN if attribute is None else PlanUse(attribute.as_int())


def _check(node: onnx_ir.Node, dtype: str) -> None:
    operator, attributes = operator_of(node), attributes_of(node)
    try:
        for name, value in attributes.items():
            # Its parser would store them cut to 32 bits, without a word.
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int) and number > _MOST_INT32:
                    raise ValueError(f"{name} is {number}; TensorRT reads 32 bits, {_MOST_INT32} at most.")
        face = face_of(operator)
        if dtype not in face.DTYPES:
            raise ValueError(f"The kernel has no {dtype}; it has {', '.join(face.DTYPES)}.")
        face.check(own_shapes(node), attributes)
    except ValueError as error:
        raise ExportError(
            f"TensorRT cannot run {operator.name} by our plugin here. {error}\n"
            "Build with --attention-impl native, which leaves it to TensorRT's own layers."
        ) from error
