"""The fused attention for texts that a sparse attention attends to densely, in a branch of the graph.

Longer texts are not for it: its time is quadratic, and with the mask that they would then need, so is its memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdexport.lowering.multi_head_attention import choice, fused_attention
from hdexport.lowering.nodes import (
    Insertion,
    group_of,
    heads_of,
    replace_result,
    shape_of,
    states_of,
    token_mask_of,
)

if TYPE_CHECKING:
    import onnx_ir

    from hdexport.lowering.lowering import SharedParts


def fuse_short_texts(node: onnx_ir.Node, parts: SharedParts, *, longest: int, name: str) -> None:
    """Let a choice take the place of a node of sparse attention: fused attention where nothing is hidden, else the
    node.

    `longest` are the tokens up to which every query of a text without padding sees every key, once.
    """
    import onnx_ir as ir

    insertion = Insertion(node)
    is_dense = are_dense(insertion, node, parts, longest)
    query, key, value = states_of(node)
    of_keys, of_values = (_heads_of_queries(insertion, node, state) for state in (key, value))
    keys, values = ((nodes[-1].outputs[0] if nodes else state) for nodes, state in ((of_keys, key), (of_values, value)))
    merges = [ir.node("Reshape", [state, insertion.integers([0, 0, -1])]) for state in (query, keys, values)]
    fused = fused_attention(node, [merge.outputs[0] for merge in merges])
    # A branch that ends with a Reshape copies what it returns: here the one of short texts.
    split = ir.node("Reshape", [fused.outputs[0], insertion.integers([0, 0, heads_of(query), -1])])
    sparse = ir.node(node.op_type, node.inputs, attributes=node.attributes, domain=node.domain)
    attended = choice(
        is_dense,
        then=[*of_keys, *of_values, *merges, fused, split],
        otherwise=[sparse],
        name=name,
        dtype=ir.DataType.FLOAT,
    )
    replace_result(node, insertion.insert(attended))


def are_dense(insertion: Insertion, node: onnx_ir.Node, parts: SharedParts, longest: int) -> onnx_ir.Value:
    """[], bool: whether every token of the texts is seen, and they have at most `longest` tokens."""
    import onnx_ir as ir

    token_mask = token_mask_of(node)  # 0 for padding, negative for tokens that no query sees

    def made() -> onnx_ir.Value:
        smallest = insertion.op("ReduceMin", [token_mask], {"keepdims": 0})
        number = insertion.op("Cast", [smallest], {"to": int(ir.DataType.INT64)})
        unpadded = insertion.op("Greater", [number, insertion.op("Constant", [], {"value_int": 0})])
        return insertion.op("And", [unpadded, are_at_most(insertion, token_mask, longest)])

    return parts.once((are_dense, token_mask, longest), made)


def are_at_most(insertion: Insertion, token_mask: onnx_ir.Value, longest: int) -> onnx_ir.Value:
    """[], bool: whether the texts have at most `longest` tokens."""
    tokens = insertion.op("Squeeze", [insertion.op("Shape", [token_mask], {"start": 1, "end": 2})])
    return insertion.op("LessOrEqual", [tokens, insertion.op("Constant", [], {"value_int": longest})])


def _heads_of_queries(insertion: Insertion, node: onnx_ir.Node, state: onnx_ir.Value) -> list[onnx_ir.Node]:
    """Nodes that repeat keys or values for each head of queries that shares them; none where each has its own.

    The fused attention does not group heads. They belong into the branch: longer texts are not copied.
    """
    import onnx_ir as ir

    group = group_of(node)
    if group == 1:
        return []
    _, _, kv_heads, head_dim = shape_of(state)
    column = ir.node("Unsqueeze", [state, insertion.integers([3])])
    repeated = ir.node("Expand", [column.outputs[0], insertion.integers([1, 1, 1, group, 1])])
    split = insertion.integers([0, 0, group * int(kv_heads), int(head_dim)])
    return [column, repeated, ir.node("Reshape", [repeated.outputs[0], split])]
