"""The graph that ONNX Runtime runs fastest on an NVIDIA GPU: the portable one, its dense attention fused.

It computes in the bundle's own type and reads the portable graph's weights. Layer normalisations of half precision have
no casts around them: ONNX Runtime's kernel computes them in float32, with the sum before them. Attention is a function:
a session runs compiled kernels in the place of functions where the bundle has them for the GPU, and their bodies
elsewhere, of standard operators, or of dense attention in the forms below. Layers whose kernels would make equal block
indexes share one. Attention by distance whose numbers all texts share is fused with a bias for every query and key, but
for longer texts, which a function in its function computes: so kernels can take the place of both, or of longer texts.

A function looks at its own mask. ONNX Runtime puts bodies in the place of nodes when it loads a graph, and then merges
equal nodes, so that all layers look at a mask once.

Which kernel ``com.microsoft::MultiHeadAttention`` takes there depends on its mask (read in the sources of ONNX
Runtime's CUDA provider; float16 and float32 since 1.16, bfloat16 since 1.24):

=====================================  ======================================================  ====================
mask                                   kernel                                                  memory over tokens
=====================================  ======================================================  ====================
none                                   flash attention in half precision, from Ampere on;      linear
                                       else CUTLASS's memory-efficient attention
[3 * batch + 2], lengths and starts    memory-efficient attention                              linear
[batch], lengths                       cuDNN's attention, which the runtime leaves out; else   linear; quadratic
                                       as [batch, tokens]
[batch, tokens]                        products, softmax and products one after the other      quadratic
=====================================  ======================================================  ====================

So there are three branches: texts without padding, texts with padding after them, which is how the runtime pads, and
any other mask. With a bias there are two: the first one and the last. Where the memory-efficient kernel is refused, the
form with starts would be read as something else and give wrong answers: it is only used where the sources refuse
nothing. A branch of the whole graph in place of one in each layer was timed on an H200, and is no faster.

Causal attention has no use for a mask where texts are packed: there are the first branch, and one that packs them. A
head of keys that several heads of queries share is repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

from hdexport.attention.registry import lowerings_of
from hdexport.graph.passes.downcast_layer_norms import DowncastLayerNorms
from hdexport.graph.passes.graph_pass import run_passes
from hdexport.graph.passes.pool_in_blocks import PoolInBlocks
from hdexport.graph.targets.onnxruntime.shared_block_indexes import ShareBlockIndexes
from hdexport.lowering.lowering import SharedParts
from hdexport.lowering.multi_head_attention import CONTRIB_DOMAIN, fused_attention
from hdexport.lowering.nodes import (
    attributes_of,
    is_causal,
    merge_heads,
    merged_states,
    operator_of,
    repeat_key_heads,
    replace_by_merged,
    same_node,
    shape_of,
    states_of,
    token_mask_of,
)
from hdexport.lowering.packed_tokens import PackedTokens
from hdexport.lowering.relative_position_bias import LONG_SEQUENCES, relative_position_bias
from hdplugins import ONNX_DOMAIN, ONNX_OPSET
from hdplugins.op_builder import OpBuilder, cond

logger = logging.getLogger(__name__)

_LONGEST_BIASED = 2048
"""Tokens up to which a bias of all queries and keys is made: it is quadratic in them, as are scores under a mask."""

_HEAD_DIM_MULTIPLE, _MOST_HEAD_DIM = 8, 1024
"""Sizes of a head that the memory-efficient kernel takes."""

_LEAST_FLOAT32_TOKENS = 256
"""Below, ONNX Runtime does not take the memory-efficient kernel in float32."""


def lower_for_onnxruntime_cuda(model: ir.Model) -> bool:
    """Lower a portable graph in place; returns whether it differs from the portable graph."""
    # Block indexes first: the function that makes a bias would be taken for a node of attention.
    modified = run_passes(
        model, [ShareBlockIndexes(), PoolInBlocks(), DowncastLayerNorms(), FuseDenseAttentionForCuda()]
    )
    if modified:
        run_passes(model, [RemoveUnusedNodesPass(), RemoveUnusedFunctionsPass()])
    return modified


class FuseDenseAttentionForCuda(ir.passes.InPlacePass):
    """Give nodes of dense attention bodies of ONNX Runtime's fused attention.

    1. A function has one body. Nodes that differ in what decides the body (`_decides_body`) from the first node of
       their type become fused attention in the graph.
    2. Where all sequences share a relative position bias, longer sequences are computed by the portable body, under a
       second name.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace bodies and nodes."""
        dense = [(node, lowering) for node, lowering in lowerings_of(model) if lowering.is_dense(node)]
        parts = SharedParts(model)
        functions: dict[ir.OperatorIdentifier, ir.Function] = {}
        decided: dict[str, object] = {
            node.op_type: None for node, lowering in lowerings_of(model) if not lowering.is_dense(node)
        }
        for node, lowering in dense:
            has_bias, decides = lowering.has_bias(node), _decides_body(node)
            if has_bias:
                _name_body_for_long_sequences(model, node)  # 2
            if decided.setdefault(node.op_type, decides) != decides:
                _fuse(node, parts, has_bias=has_bias)  # 1
            elif node.op_identifier() not in functions:
                functions[node.op_identifier()] = _fused_function(model, node, has_bias=has_bias)
        model.functions.update(functions)
        if dense:
            model.graph.opset_imports[CONTRIB_DOMAIN] = 1
            logger.info("%d attentions are fused in ONNX Runtime on a GPU", len(dense))
        return ir.passes.PassResult(model, modified=bool(dense))


def _name_body_for_long_sequences(model: ir.Model, node: ir.Node) -> None:
    """Give a node's body a second name, by which longer sequences call it."""
    body = model.functions[node.op_identifier()].clone()
    body.name += LONG_SEQUENCES
    model.functions.setdefault(body.identifier(), body)


def _fuse(node: ir.Node, parts: SharedParts, *, has_bias: bool) -> None:
    """Put the fused attention in the place of a node of dense attention."""
    replace_by_merged(OpBuilder.before(node), node, _Fusion(node, parts).attended(has_bias=has_bias))


def _fused_function(model: ir.Model, node: ir.Node, *, has_bias: bool) -> ir.Function:
    """The fused attention as the body of the node's function."""
    by_name = dict(zip(operator_of(node).inputs, node.inputs, strict=False))
    inputs = [ir.Value(name=name, shape=value.shape, type=value.type) for name, value in by_name.items() if value]
    output = ir.Value(name="out", shape=node.outputs[0].shape, type=node.outputs[0].type)
    opsets = {"": ONNX_OPSET, CONTRIB_DOMAIN: 1, ONNX_DOMAIN: model.graph.opset_imports[ONNX_DOMAIN]}
    graph = ir.Graph(inputs, [output], nodes=[], opset_imports=opsets, name=node.op_type)
    op = OpBuilder.append(graph)
    op.call(node.op_type, *inputs, _domain=node.domain, _outputs=[output], **node.attributes)
    _fuse(graph[0], SharedParts(model), has_bias=has_bias)
    declared = [ir.Attr(name, attribute.type, None) for name, attribute in node.attributes.items()]
    return ir.Function(node.domain, node.op_type, graph=graph, attributes=declared)


def _decides_body(node: ir.Node) -> object:
    """What decides the body of fused attention: nodes with equal values share a body."""
    query, key, *_ = states_of(node)
    return query.dtype, shape_of(query)[2:], shape_of(key)[2:], attributes_of(node)


class _Fusion:
    """The nodes that take the place of a node of dense attention, in the type of its states.

    Methods return [batch, tokens, hidden].
    """

    def __init__(self, node: ir.Node, parts: SharedParts) -> None:
        assert node.inputs[0] is not None
        assert node.inputs[0].dtype is not None
        self._op = OpBuilder.before(node)
        repeat_key_heads(self._op, node)
        self._node, self._parts = node, parts
        self._name, self._dtype = parts.new_name("attention"), node.inputs[0].dtype

    def attended(self, *, has_bias: bool) -> ir.Value:
        """The attention of all tokens to each other, or of each token to those before it."""
        op, node, parts, key_mask = self._op, self._node, self._parts, token_mask_of(self._node)
        if is_causal(node):
            return self._causal(parts.once((PackedTokens, key_mask), lambda: PackedTokens(op, key_mask)))
        mask = parts.once((_Mask, key_mask), lambda: _Mask(op, key_mask, self._dtype))
        states = merged_states(op, node)
        if not has_bias:
            return self._fused(op, states, mask, name=self._name)
        bias = relative_position_bias(op, node, parts, by_rows=False, key_mask=mask.short)
        if bias.dtype != self._dtype:
            bias = op.Cast(bias, to=self._dtype)

        def fused(op: OpBuilder) -> ir.Value:
            return self._fused(op, states, mask, bias=bias, name=f"{self._name}_fused")

        def function(op: OpBuilder) -> ir.Value:
            return merge_heads(op, same_node(op, node, node.op_type + LONG_SEQUENCES))

        return cond(op, mask.is_short, fused, function, name=self._name, dtype=self._dtype)

    def _fused(
        self,
        op: OpBuilder,
        states: Sequence[ir.Value],
        mask: _Mask,
        *,
        bias: ir.Value | None = None,
        name: str,
    ) -> ir.Value:
        """The attention for the mask."""
        node = self._node
        scale = self._op.Cast(node.attributes["scale"].as_float(), to=self._dtype)

        def unmasked(op: OpBuilder) -> ir.Value:
            return fused_attention(op, node, states, bias=bias)

        def by_key(op: OpBuilder) -> ir.Value:
            # With this mask the products are stored in the graph's type before they are scaled, so the query is scaled
            # instead: float16 overflows otherwise.
            scaled = [op.Mul(states[0], scale), *states[1:]]
            return fused_attention(op, node, scaled, key_mask=mask.int32_mask, bias=bias, scale=1.0)

        def by_start(op: OpBuilder) -> ir.Value:
            return fused_attention(op, node, states, key_mask=mask.starts)

        def masked(op: OpBuilder) -> ir.Value:
            if bias is None and _has_memory_efficient_kernel(node):
                attended = cond(op, mask.ends, by_start, by_key, name=f"{name}_masked", dtype=self._dtype)
            else:
                attended = by_key(op)
            # A row without any real key is 0 by definition, and something finite without this.
            return op.Mul(attended, mask.any_key)

        return cond(op, mask.unmasked, unmasked, masked, name=name, dtype=self._dtype)

    def _causal(self, packing: PackedTokens) -> ir.Value:
        """The attention of each token to those before it, which packs no sequences where no token is padding."""
        op, node = self._op, self._node
        zero = op.Cast(0.0, to=self._dtype)
        states = merged_states(op, node)

        def unmasked(op: OpBuilder) -> ir.Value:
            return fused_attention(op, node, states, causal=True)

        def packed(op: OpBuilder) -> ir.Value:
            attended = fused_attention(op, node, packing.pack(op, states), causal=True)
            return packing.unpack(op, attended, zero)

        return cond(op, packing.unmasked, unmasked, packed, name=self._name, dtype=self._dtype)


class _Mask:
    """Values computed from a key mask, [batch, tokens], bool, once for all attentions of a graph.

    Attributes:
        unmasked: [], bool, whether every token is real.
        int32_mask: [batch, tokens], int32.
        ends: [], bool, whether all padding is after its sequence, and the sequences are long enough for `starts`.
        starts: [3 * batch + 2], int32: keys of each row, at least 1; where the queries of each row start and the last
            row's queries end; and where the keys do.
        any_key: [batch, 1, 1], in the graph's type, 1 for rows with a real token.
        is_short: [], bool, whether sequences are short enough for a bias.
        short: [batch, tokens], bool, the key mask where they are, else [batch, 0].
    """

    def __init__(self, op: OpBuilder, key_mask: ir.Value, dtype: ir.DataType) -> None:
        int32, boolean = ir.DataType.INT32, ir.DataType.BOOL
        self.int32_mask = op.Cast(key_mask, to=int32)
        self.unmasked = op.Cast(op.ReduceMin(self.int32_mask, keepdims=0), to=boolean)
        counts = op.ReduceSum(self.int32_mask, [1], keepdims=1)  # [batch, 1]
        one = op.Cast([1], to=int32)  # [1]
        self.any_key = op.Cast(op.Unsqueeze(op.Min(counts, one), [1]), to=dtype)

        batch, tokens = (op.Squeeze(op.Shape(key_mask, start=axis, end=axis + 1)) for axis in (0, 1))
        self.is_short = op.LessOrEqual(tokens, _LONGEST_BIASED)
        kept = op.Where(self.is_short, tokens, 0)
        self.short = op.Slice(key_mask, [0], op.Unsqueeze(kept, [0]), [1])
        positions = op.Cast(op.Range(0, tokens, 1), to=int32)
        is_in_sequence = op.Less(positions, counts)  # [batch, tokens]
        agrees = op.Cast(op.Equal(is_in_sequence, key_mask), to=int32)
        self.ends = op.Cast(op.ReduceMin(agrees, keepdims=0), to=boolean)
        if dtype == ir.DataType.FLOAT:
            self.ends = op.And(self.ends, op.GreaterOrEqual(tokens, _LEAST_FLOAT32_TOKENS))

        rows = op.Range(0, op.Add(batch, 1), 1)
        starts = op.Cast(op.Mul(rows, tokens), to=int32)  # [batch + 1]
        lengths = op.Squeeze(op.Max(counts, one), [1])  # [batch]
        self.starts = op.Concat(lengths, starts, starts, axis=0)


def _has_memory_efficient_kernel(node: ir.Node) -> bool:
    assert node.inputs[0] is not None
    assert node.inputs[0].shape is not None
    head_dim = node.inputs[0].shape[3]
    return isinstance(head_dim, int) and head_dim % _HEAD_DIM_MULTIPLE == 0 and head_dim <= _MOST_HEAD_DIM
