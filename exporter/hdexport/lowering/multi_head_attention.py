"""ONNX Runtime's fused attention, ``com.microsoft::MultiHeadAttention``, in place of an operator's node.

Without a mask it is a flash attention, its memory linear in tokens; with most masks it is not. So a graph holds
branches, and chooses by the tokens it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hdexport.lowering.nodes import heads_of, operator_of, shape_of

if TYPE_CHECKING:
    import onnx_ir


CONTRIB_DOMAIN = "com.microsoft"

# ONNX Runtime adds this to masked scores; exp() of it is exactly 0 beside any real score.
_MASKED_SCORE = -1.0e30

SWAP_HEADS_AND_TOKENS = (0, 2, 1, 3)
"""Permutation of axes: from [batch, tokens, heads, head_dim] to [batch, heads, tokens, head_dim], and back."""


class Insertion:
    """Inserts nodes before a given one of the main graph."""

    def __init__(self, before: onnx_ir.Node) -> None:
        self._before = before

    def op(
        self, op_type: str, inputs: Sequence[onnx_ir.Value | None], attributes: Mapping[str, object] | None = None
    ) -> onnx_ir.Value:
        """The output of a new node."""
        import onnx_ir as ir

        return self.insert(ir.node(op_type, inputs, attributes=attributes))

    def insert(self, node: onnx_ir.Node) -> onnx_ir.Value:
        """The output of a node that is put in."""
        assert self._before.graph is not None
        self._before.graph.insert_before(self._before, node)
        return node.outputs[0]

    def integers(self, values: Sequence[int]) -> onnx_ir.Value:
        """A constant [len(values)], int64."""
        return self.op("Constant", [], {"value_ints": list(values)})


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


def repeat_key_heads(insertion: Insertion, node: onnx_ir.Node) -> None:
    """Give each head of a node's queries a head of keys and values of its own, where several share one."""
    import onnx_ir as ir

    heads = heads_of(node.inputs[0])
    for index, state in enumerate(node.inputs[1:3], start=1):
        assert state is not None
        batch, kv_heads, tokens, head_dim = shape_of(state)
        if kv_heads == heads:
            continue
        column = insertion.op("Unsqueeze", [state, insertion.integers([2])])
        copies = insertion.integers([1, 1, heads // int(kv_heads), 1, 1])
        repeated = insertion.op("Expand", [column, copies])  # [batch, kv_heads, heads / kv_heads, tokens, head_dim]
        each = insertion.op("Reshape", [repeated, insertion.integers([0, heads, -1, int(head_dim)])])
        each.dtype, each.shape = state.dtype, ir.Shape([batch, heads, tokens, head_dim])
        node.replace_input_with(index, each)


def states_tokens_first(insertion: Insertion, node: onnx_ir.Node) -> list[onnx_ir.Value]:
    """A node's states as [batch, tokens, heads, head_dim], from before they were turned, where they were."""
    states = []
    for heads in node.inputs[: operator_of(node).states]:
        assert heads is not None
        before = _before_transposition(heads)
        states.append(before or insertion.op("Transpose", [heads], {"perm": SWAP_HEADS_AND_TOKENS}))
    return states


def merge_heads(insertion: Insertion, tokens_first: onnx_ir.Value) -> onnx_ir.Value:
    """[batch, tokens, heads, head_dim] as [batch, tokens, hidden], which copies nothing."""
    return insertion.op("Reshape", [tokens_first, insertion.integers([0, 0, -1])])


def merged_states(insertion: Insertion, node: onnx_ir.Node) -> list[onnx_ir.Value]:
    """A node's states as [batch, tokens, hidden]."""
    return [merge_heads(insertion, state) for state in states_tokens_first(insertion, node)]


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


def replace_by_merged(insertion: Insertion, node: onnx_ir.Node, merged: onnx_ir.Value) -> None:
    """Let what reads a node's heads, [batch, heads, tokens, head_dim], read merged ones, [batch, tokens, hidden].

    Where it only swaps heads and tokens, nothing is swapped.
    """
    import onnx_ir as ir

    heads = node.outputs[0]
    assert heads.shape is not None
    batch, num_heads, tokens, head_dim = heads.shape
    tokens_first = insertion.op("Reshape", [merged, insertion.integers([0, 0, int(num_heads), -1])])
    tokens_first.dtype, tokens_first.shape = heads.dtype, ir.Shape([batch, tokens, num_heads, head_dim])
    for user in {use.node for use in heads.uses()}:
        if _swaps_heads_and_tokens(user):
            ir.convenience.replace_all_uses_with(user.outputs[0], tokens_first)
            assert user.graph is not None
            user.graph.remove(user, safe=True)
    if heads.uses():
        split = insertion.op("Transpose", [tokens_first], {"perm": SWAP_HEADS_AND_TOKENS})
        split.dtype, split.shape = heads.dtype, heads.shape
        ir.convenience.replace_all_uses_with(heads, split)


def _branch(name: str, nodes: Sequence[onnx_ir.Node], dtype: onnx_ir.DataType) -> onnx_ir.Graph:
    import onnx_ir as ir

    # A branch shares its names with the whole graph, so each needs its own.
    for number, node in enumerate(nodes):
        for index, output in enumerate(node.outputs):
            output.name = f"{name}_{number}_{index}" if index else f"{name}_{number}"
            output.dtype = dtype
    return ir.Graph([], [nodes[-1].outputs[0]], nodes=nodes, name=name)


def _before_transposition(heads: onnx_ir.Value) -> onnx_ir.Value | None:
    """[batch, tokens, heads, head_dim], where heads and tokens were only swapped; None where more was done."""
    swap = heads.producer()
    return swap.inputs[0] if swap is not None and _swaps_heads_and_tokens(swap) else None


def _swaps_heads_and_tokens(node: onnx_ir.Node) -> bool:
    return node.op_type == "Transpose" and node.attributes["perm"].as_ints() == SWAP_HEADS_AND_TOKENS
