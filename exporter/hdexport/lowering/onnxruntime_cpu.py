"""The graph that ONNX Runtime runs fastest on a CPU.

It computes in float32 whatever the bundle's dtype, for ONNX Runtime gains nothing from half precision on a CPU, and
reads the portable graph's weights. Attention becomes ``com.microsoft::MultiHeadAttention``, which without a mask is a
flash attention with memory linear in tokens, and with one is not: the graph holds both and looks at the mask. The
runtime feeds padding only where it cannot be avoided.
"""

from __future__ import annotations

__all__ = ["FUSED_DTYPES", "lower_for_onnxruntime_cpu"]

from typing import TYPE_CHECKING

from hdexport.passes.graph_nodes import operator_nodes
from hdexport.passes.widen_to_float32 import widen_to_float32
from hdruntime.errors import ExportError

if TYPE_CHECKING:
    import onnx_ir

FUSED_DTYPES = {"DenseAttention": ("float32",)}
"""Operator -> dtypes in which this lowering computes it with a fused kernel; a half-precision graph is widened."""

_CONTRIB_DOMAIN = "com.microsoft"

# ONNX Runtime adds this to masked scores; exp() of it is exactly 0 beside any real score.
_MASKED_SCORE = -1.0e30


def lower_for_onnxruntime_cpu(model: onnx_ir.Model) -> onnx_ir.Model:
    """Lower a portable graph.

    Args:
        model: the portable graph; it is changed and returned, so hand in a copy.

    Raises:
        ExportError: an attention is not surrounded by the head-splitting that every supported family has.
    """
    from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

    widen_to_float32(model)
    nodes = operator_nodes(model, "DenseAttention")
    masks: dict[onnx_ir.Value, _Mask] = {}
    for number, node in enumerate(nodes):
        key_mask = node.inputs[3]
        assert key_mask is not None
        if key_mask not in masks:
            masks[key_mask] = _Mask(model, node, key_mask)
        _replace(model, node, masks[key_mask], name=f"attention_{number}")
    model.graph.opset_imports[_CONTRIB_DOMAIN] = 1
    RemoveUnusedNodesPass()(model)
    RemoveUnusedFunctionsPass()(model)
    return model


class _Mask:
    """What every attention of a graph needs of one key mask, computed once.

    Attributes:
        unmasked: [], bool, whether every token is real.
        numbers: [batch, tokens], int32.
        any_key: [batch, 1, 1], float32, 1 for rows with a real token.
    """

    def __init__(self, model: onnx_ir.Model, before: onnx_ir.Node, key_mask: onnx_ir.Value) -> None:
        import onnx_ir as ir

        tape = _Insertion(model, before)
        self.numbers = tape.op("Cast", [key_mask], {"to": int(ir.DataType.INT32)})
        smallest = tape.op("ReduceMin", [self.numbers], {"keepdims": 0})
        self.unmasked = tape.op("Cast", [smallest], {"to": int(ir.DataType.BOOL)})
        axes = tape.constant("key_axis", [1])
        largest = tape.op("ReduceMax", [self.numbers, axes], {"keepdims": 1})  # [batch, 1]
        column = tape.op("Unsqueeze", [largest, axes])  # [batch, 1, 1]
        self.any_key = tape.op("Cast", [column], {"to": int(ir.DataType.FLOAT)})


class _Insertion:
    """Appends nodes in front of a given one."""

    def __init__(self, model: onnx_ir.Model, before: onnx_ir.Node) -> None:
        self.model, self.before = model, before

    def op(
        self, op_type: str, inputs: list[onnx_ir.Value | None], attributes: dict[str, object] | None = None
    ) -> onnx_ir.Value:
        import onnx_ir as ir

        node = ir.node(op_type, inputs, attributes=attributes)
        self.model.graph.insert_before(self.before, node)
        return node.outputs[0]

    def constant(self, name: str, values: list[int]) -> onnx_ir.Value:
        import numpy as np
        import onnx_ir as ir

        node = ir.node("Constant", [], attributes={"value": ir.tensor(np.array(values, np.int64), name=name)})
        self.model.graph.insert_before(self.before, node)
        return node.outputs[0]


def _replace(model: onnx_ir.Model, node: onnx_ir.Node, mask: _Mask, *, name: str) -> None:
    """Replace one attention and the splitting and merging of heads around it."""
    import onnx_ir as ir

    query, key, value = (_before_split(node, index) for index in range(3))
    bias = node.inputs[4] if len(node.inputs) > 4 else None
    split = node.inputs[0]
    assert split is not None
    assert split.shape is not None
    attributes = {"num_heads": int(split.shape[1]), "scale": node.attributes["scale"].as_float()}
    merged = _after_merge(node)

    def attend(key_mask: onnx_ir.Value | None) -> onnx_ir.Node:
        return ir.node(
            "MultiHeadAttention",
            [query, key, value, None, key_mask, bias],
            attributes={**attributes, "mask_filter_value": _MASKED_SCORE},
            domain=_CONTRIB_DOMAIN,
        )

    free, masked = attend(None), attend(mask.numbers)
    # A row without any real key is 0 by definition, and uniform without this.
    zeroed = ir.node("Mul", [masked.outputs[0], mask.any_key])
    choice = ir.node(
        "If",
        [mask.unmasked],
        attributes={
            "then_branch": ir.AttrGraph("then_branch", _branch(f"{name}_unmasked", [free])),
            "else_branch": ir.AttrGraph("else_branch", _branch(f"{name}_masked", [masked, zeroed])),
        },
    )
    choice.outputs[0].name = name
    choice.outputs[0].dtype, choice.outputs[0].shape = merged.dtype, merged.shape
    model.graph.insert_before(node, choice)
    ir.convenience.replace_all_uses_with(merged, choice.outputs[0])


def _branch(name: str, nodes: list[onnx_ir.Node]) -> onnx_ir.Graph:
    import onnx_ir as ir

    # A branch shares its names with the whole graph, so each needs its own.
    for number, node in enumerate(nodes):
        node.outputs[0].name = f"{name}_{number}"
        node.outputs[0].dtype = ir.DataType.FLOAT
    return ir.Graph([], [nodes[-1].outputs[0]], nodes=nodes, name=name)


def _before_split(node: onnx_ir.Node, index: int) -> onnx_ir.Value:
    """The [batch, tokens, hidden] value that Reshape and Transpose split into heads."""
    split = node.inputs[index]
    transpose = split.producer() if split is not None else None
    reshape = _producer_of(transpose, "Transpose")
    if transpose is None or reshape is None or transpose.attributes["perm"].as_ints() != (0, 2, 1, 3):
        raise ExportError(_nearest_miss(node, f"input {index} comes from {transpose!r}"))
    merged = reshape.inputs[0]
    if reshape.op_type != "Reshape" or merged is None:
        raise ExportError(_nearest_miss(node, f"input {index} comes from {reshape!r}"))
    return merged


def _producer_of(node: onnx_ir.Node | None, op_type: str) -> onnx_ir.Node | None:
    if node is None or node.op_type != op_type or node.inputs[0] is None:
        return None
    return node.inputs[0].producer()


def _after_merge(node: onnx_ir.Node) -> onnx_ir.Value:
    """The [batch, tokens, hidden] value that Transpose and Reshape make of the heads."""
    transposes = [use.node for use in node.outputs[0].uses()]
    if len(transposes) != 1 or transposes[0].op_type != "Transpose":
        raise ExportError(_nearest_miss(node, f"its output goes to {transposes!r}"))
    reshapes = [use.node for use in transposes[0].outputs[0].uses()]
    if len(reshapes) != 1 or reshapes[0].op_type != "Reshape":
        raise ExportError(_nearest_miss(node, f"its transposed output goes to {reshapes!r}"))
    return reshapes[0].outputs[0]


def _nearest_miss(node: onnx_ir.Node, found: str) -> str:
    return (
        f"The attention {node.name} is not between a splitting (Reshape, Transpose) and a merging "
        f"(Transpose, Reshape) of heads: {found}.\n"
        "Please report the model and the versions that `hdexport doctor` prints."
    )
