"""The fused attention, in a branch of the graph, for sequences that a sparse attention attends to densely.

Longer sequences do not use it: its time is quadratic in tokens, and so is its memory with the mask that they need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdexport.lowering.multi_head_attention import fused_attention
from hdexport.lowering.nodes import (
    group_of,
    heads_of,
    merge_heads,
    repeated_heads,
    replace_result,
    same_node,
    states_of,
    token_mask_of,
)
from hdplugins.op_builder import OpBuilder, cond

if TYPE_CHECKING:
    import onnx_ir

    from hdexport.lowering.lowering import SharedParts


def fuse_short_sequences(node: onnx_ir.Node, parts: SharedParts, *, max_tokens: int, name: str) -> None:
    """Replace a node of sparse attention by a branch: fused attention where every query sees every key, else the node.

    In sequences of at most `max_tokens` tokens without padding, every query sees every key once.
    """
    import onnx_ir as ir

    op = OpBuilder.before(node)
    query, *keys_and_values = states_of(node)

    def dense(op: OpBuilder) -> onnx_ir.Value:
        # The fused attention does not group heads. Heads are repeated in the branch: longer sequences are not copied.
        group = group_of(node)
        repeated = [state if group == 1 else repeated_heads(op, state, group) for state in keys_and_values]
        fused = fused_attention(op, node, [merge_heads(op, state) for state in (query, *repeated)])
        # A branch that ends with a Reshape copies its output: here the branch of short sequences.
        return op.Reshape(fused, [0, 0, heads_of(query), -1])

    def sparse(op: OpBuilder) -> onnx_ir.Value:
        return same_node(op, node)

    is_dense = are_dense(op, node, parts, max_tokens)
    replace_result(node, cond(op, is_dense, dense, sparse, name=name, dtype=ir.DataType.FLOAT))


def are_dense(op: OpBuilder, node: onnx_ir.Node, parts: SharedParts, max_tokens: int) -> onnx_ir.Value:
    """[], bool: whether every token of the sequences is seen, and they have at most `max_tokens` tokens."""
    import onnx_ir as ir

    token_mask = token_mask_of(node)  # 0 for padding, negative for tokens that no query sees

    def make() -> onnx_ir.Value:
        smallest = op.Cast(op.ReduceMin(token_mask, keepdims=0), to=ir.DataType.INT64)
        return op.And(op.Greater(smallest, 0), are_at_most(op, token_mask, max_tokens))

    return parts.once((are_dense, token_mask, max_tokens), make)


def are_at_most(op: OpBuilder, token_mask: onnx_ir.Value, max_tokens: int) -> onnx_ir.Value:
    """[], bool: whether the sequences have at most `max_tokens` tokens."""
    return op.LessOrEqual(op.Squeeze(op.Shape(token_mask, start=1, end=2)), max_tokens)
