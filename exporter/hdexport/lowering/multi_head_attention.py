"""ONNX Runtime's fused attention, ``com.microsoft::MultiHeadAttention``, in place of an operator's node.

Without a mask it is a flash attention, its memory linear in tokens; with most masks it is not. So a graph holds
branches, and chooses by the tokens it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdexport.lowering.nodes import Insertion, heads_of

if TYPE_CHECKING:
    import onnx_ir

CONTRIB_DOMAIN = "com.microsoft"

# ONNX Runtime adds this to masked scores; exp() of it is exactly 0 beside any real score.
_MASKED_SCORE = -1.0e30


def fused_attention(
    node: onnx_ir.Node,
    states: Sequence[onnx_ir.Value],
    *,
    key_mask: onnx_ir.Value | None = None,
    bias: onnx_ir.Value | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> onnx_ir.Node:
    """A node of the fused attention, not in any graph yet; its output is [batch, tokens, hidden].

    Args:
        node: the operator's node, for its heads.
        states: query, key and value, [batch, tokens, hidden]. Keys and values of four axes would do as well, but then
            ONNX Runtime 1.31.1 holds all scores in memory: 950 MB more at 4096 tokens of 12 heads, and 1.4 of the time.
        key_mask: int32, [batch, tokens] with 0 for padding, or another of the operator's forms; None if nothing is
            padding.
        bias: [1 or batch, heads, tokens, tokens], added to the scores.
        scale: factor of the scores; None for the node's.
        causal: whether a token sees only those up to itself. On a CPU, that takes memory for all scores.
    """
    import onnx_ir as ir

    return ir.node(
        "MultiHeadAttention",
        [*states, None, key_mask, bias],
        attributes={
            "num_heads": heads_of(node.inputs[0]),
            "scale": node.attributes["scale"].as_float() if scale is None else scale,
            "mask_filter_value": _MASKED_SCORE,
            **({"unidirectional": 1} if causal else {}),
        },
        domain=CONTRIB_DOMAIN,
    )


class KeyMask:
    """The parts of one key mask that every attention of a graph needs, computed once.

    Attributes:
        unmasked: [], bool, whether every token is real.
        numbers: [batch, tokens], int32.
        any_key: [batch, 1, 1], float32, 1 for rows with a real token.
    """

    def __init__(self, insertion: Insertion, key_mask: onnx_ir.Value) -> None:
        import onnx_ir as ir

        self.numbers = insertion.op("Cast", [key_mask], {"to": int(ir.DataType.INT32)})
        smallest = insertion.op("ReduceMin", [self.numbers], {"keepdims": 0})
        self.unmasked = insertion.op("Cast", [smallest], {"to": int(ir.DataType.BOOL)})
        axes = insertion.integers([1])
        largest = insertion.op("ReduceMax", [self.numbers, axes], {"keepdims": 1})  # [batch, 1]
        column = insertion.op("Unsqueeze", [largest, axes])  # [batch, 1, 1]
        self.any_key = insertion.op("Cast", [column], {"to": int(ir.DataType.FLOAT)})


def masked_choice(
    node: onnx_ir.Node,
    states: Sequence[onnx_ir.Value],
    mask: KeyMask,
    *,
    bias: onnx_ir.Value | None = None,
    name: str,
) -> onnx_ir.Node:
    """A node that gives [batch, tokens, hidden], by the fused attention without a mask where no token is padding.

    It takes the place of an operator's `node`, whose heads and scale it has. `bias` is [1, heads, tokens, tokens].
    """
    import onnx_ir as ir

    free = fused_attention(node, states, bias=bias)
    masked = fused_attention(node, states, key_mask=mask.numbers, bias=bias)
    # A row without any real key is 0 by definition, and uniform without this.
    zeroed = ir.node("Mul", [masked.outputs[0], mask.any_key])
    return choice(mask.unmasked, then=[free], otherwise=[masked, zeroed], name=name, dtype=ir.DataType.FLOAT)


def choice(
    condition: onnx_ir.Value,
    *,
    then: Sequence[onnx_ir.Node],
    otherwise: Sequence[onnx_ir.Node],
    name: str,
    dtype: onnx_ir.DataType,
) -> onnx_ir.Node:
    """A node that runs one of two branches, and gives what the last node there does; not in any graph yet.

    The condition is [], bool. All names in the branches begin with `name`, and all their nodes give `dtype`.
    """
    import onnx_ir as ir

    branches = {
        "then_branch": ir.AttrGraph("then_branch", _branch(f"{name}_then", then, dtype)),
        "else_branch": ir.AttrGraph("else_branch", _branch(f"{name}_else", otherwise, dtype)),
    }
    node = ir.node("If", [condition], attributes=branches)
    node.outputs[0].name, node.outputs[0].dtype = name, dtype
    return node


def _branch(name: str, nodes: Sequence[onnx_ir.Node], dtype: onnx_ir.DataType) -> onnx_ir.Graph:
    import onnx_ir as ir

    # A branch shares its names with the whole graph, so each needs its own.
    for number, node in enumerate(nodes):
        for index, output in enumerate(node.outputs):
            output.name = f"{name}_{number}_{index}" if index else f"{name}_{number}"
            output.dtype = dtype
    return ir.Graph([], [nodes[-1].outputs[0]], nodes=nodes, name=name)
