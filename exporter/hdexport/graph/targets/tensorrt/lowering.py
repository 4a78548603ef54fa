"""The graph that TensorRT runs fastest: dense attention becomes a fused operator, sparse attention hdexport's plugin.

TensorRT's ONNX parser turns ``Attention`` (opset 23) into its attention layer, one kernel whose memory is
linear in tokens. What that costs depends on the mask. Activations that TensorRT-RTX 1.7.1 plans for two
layers of 2 heads of 32, batch 8:

====================================  ===========  ============
mask of the attention layer           4096 tokens  16384 tokens
====================================  ===========  ============
none                                  38 MB        134 MB
additive, [batch, 1, 1, tokens]       38 MB        134 MB
boolean, [batch, 1, 1, tokens]        38 MB        135 MB
additive, [batch, 1, tokens, tokens]  306 MB       4446 MB
====================================  ===========  ============

The additive form with one row per sequence is taken: as cheap as no mask, right for any key mask (lengths alone
would not express padding on the left), and finite, so that nothing meets ``inf - inf``. The builder itself
checks that a mask is broadcastable to [batch, heads, tokens, tokens] (findings/tensorrt_rtx_holds_expanded_masks.sh).

A causal attention layer takes no mask: texts with padding are packed for it.

An operator with a plugin becomes its node, or keeps its body, as `AttentionImpl` says: a choice of the user's, made by
nothing else. Dense attention with a bias that all texts share, where it is no plugin, is an attention layer with the
fourth of these masks in engines for short texts.

Two passes of other targets are not for engines. TensorRT-RTX 1.7.1 ends with an internal error where it plans a loop of
`PoolInBlocks`. It fuses the activation of a feed-forward network with the first product, and plans memory mostly for
attention: 201 MB for two layers of BERT-base at 16384 tokens in float16, and as much if their networks are cut out.
Loops of `ChunkFeedForward` add to that, because their results are kept to the end
(findings/tensorrt_rtx_keeps_results_of_loops.sh): 12 networks alone take 159 MB, in loops 383 MB.
"""

from __future__ import annotations

import functools
import logging
from enum import StrEnum

import onnx_ir as ir

from hdexport.attention.registry import lowering_of
from hdexport.graph.passes.graph_pass import run_passes
from hdexport.graph.targets.tensorrt.plugin_nodes import UsePlugins, plugin_nodes
from hdexport.lowering.lowering import SharedParts
from hdexport.lowering.nodes import (
    is_causal,
    merge_heads,
    operator_nodes,
    replace_by_merged,
    replace_result,
    states_of,
    token_mask_of,
)
from hdexport.lowering.packed_tokens import PackedTokens
from hdexport.lowering.relative_position_bias import relative_position_bias
from hdplugins.attention.function_parts import transpose_heads_and_tokens
from hdplugins.op_builder import OpBuilder
from hdruntime.errors import ExportError, Setting

logger = logging.getLogger(__name__)

_LAYER_DTYPES = ("float16", "bfloat16")
"""Of TensorRT's attention layer."""

_LONGEST_BIASED = 1024
"""Tokens up to which a bias of all queries and keys is made: of 12 heads and 8 texts, it takes 201 MB."""

_ATTENTION_OPSET = 23
"""The first standard opset with ``Attention``."""

_ATTENTION_IR_VERSION = 11
"""The ONNX file version that came with that opset."""

_CHANGED_SINCE_OPSET_20 = frozenset({"GroupNormalization"})
"""Operators whose meaning differs between opsets 20 and 23; all others only accept more types."""

_MASKED_SCORE = -32768.0
"""Added to the scores of masked keys. Their weights underflow to 0, and half of float16's range is left for
the score itself, so that the sum stays finite; exact in float16 and bfloat16."""

_FUSED_HEAD_DIMS = range(9, 257)
"""Sizes of a head that the attention layer has a kernel for (TensorRT-RTX 1.7.1: 8 and 257 fail to build)."""

_MAX_TOP_VALUES = 3840
"""Values that TensorRT's TopK layer takes; a build with one more fails."""


class AttentionImpl(StrEnum):
    """What computes the operators that have kernels: these, by plugins in engines, or a backend's own operators.

    Attributes:
        AUTO: hdexport's kernels, unless a backend has a fused kernel that they are not known to be faster than.
        PLUGIN: the kernels; in engines the same.
        NATIVE: what backends have, or the operators' bodies.
    """

    AUTO = "auto"
    PLUGIN = "plugin"
    NATIVE = "native"


def tensorrt_graph(
    model: ir.Model,
    *,
    dtype: str,
    attention_impl: AttentionImpl = AttentionImpl.AUTO,
    longest: int | None = None,
) -> ir.Model:
    """Lower a portable graph for TensorRT and TensorRT-RTX: a graph of its own that shares the weights.

    In float32 TensorRT has no fused attention and rejects the layer: there, and for heads of a size it has no kernel
    for, nodes keep their function body, whose memory is quadratic in tokens.

    Args:
        attention_impl: implementation of the operators that have a plugin; TensorRT fuses the other operators.
        longest: tokens of the longest text that engines take; None where that is not known, so that nothing may be
            quadratic in it that need not be.

    Raises:
        ExportError: the graph cannot be raised to the opset that attention needs, a plugin has no kernel for a node, or
            there are more global tokens than TensorRT can select.
    """
    from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

    lowered: ir.Model = model.clone()
    plugins = [] if attention_impl is AttentionImpl.NATIVE else [UsePlugins(dtype=dtype)]
    # TensorRT's parser knows no domains. A node is the standard operator of its name, else the model's function of that
    # name, else a plugin (findings/tensorrt_rtx_parser_ignores_domains.sh): unused functions are removed.
    passes = [
        *plugins,
        CheckSelections(),
        FuseDenseAttentionForTensorRt(dtype=dtype, longest=longest),
        RemoveUnusedNodesPass(),
        RemoveUnusedFunctionsPass(),
    ]
    run_passes(lowered, passes)
    return lowered


class FuseDenseAttentionForTensorRt(ir.passes.InPlacePass):
    """Replace nodes of dense attention by ``Attention`` (opset 23), where TensorRT has a fused kernel.

    1. Causal attention takes no mask: sequences with padding are packed.
    2. Other attention takes the mask, and a relative position bias that all sequences share, as additive scores.
    """

    def __init__(self, *, dtype: str, longest: int | None) -> None:
        self._dtype, self._longest = dtype, longest

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        dtype = self._dtype
        nodes = _fusible_nodes(model, longest=self._longest) if dtype in _LAYER_DTYPES else []
        if nodes:
            _raise_opset(model)
        parts = SharedParts(model)
        for node in nodes:
            key_mask, op = token_mask_of(node), OpBuilder.before(node)
            if is_causal(node):  # 1
                packed = parts.once((PackedTokens, key_mask), functools.partial(PackedTokens, op, key_mask))
                _replace_by_causal_attention(node, packed, dtype)
            else:  # 2
                mask = parts.once((_Mask, key_mask), functools.partial(_Mask, op, key_mask, dtype))
                has_bias = lowering_of(node).has_bias(node)
                bias = relative_position_bias(op, node, parts, by_rows=False) if has_bias else None
                _replace_by_attention(node, mask, bias, dtype)
        if nodes:
            logger.info("%d attentions are TensorRT attention layers", len(nodes))
        return ir.passes.PassResult(model, modified=bool(nodes))


class _Mask:
    """The parts of a mask that all attentions over the same keys share.

    Attributes:
        scores: [batch, 1, 1, tokens], 0 for real keys and ``_MASKED_SCORE`` for others.
        keep: [batch, 1, tokens, 1], bool, True for real keys.
        zero: scalar, the value of a masked token.
    """

    def __init__(self, op: OpBuilder, key_mask: ir.Value, dtype: str) -> None:
        to = ir.DataType[dtype.upper()]
        row, self.keep = (op.Unsqueeze(key_mask, axes) for axes in ([1, 2], [1, 3]))
        self.scores = op.Cast(op.Where(row, 0.0, _MASKED_SCORE), to=to)
        self.zero = op.Cast(0.0, to=to)


def _fusible_nodes(model: ir.Model, *, longest: int | None) -> list[ir.Node]:
    plugins, is_short = plugin_nodes(model), longest is not None and longest <= _LONGEST_BIASED
    dense = [node for node in operator_nodes(model) if node not in plugins and lowering_of(node).is_dense(node)]
    nodes = [node for node in dense if is_short or not lowering_of(node).has_bias(node)]
    reasons = {node: _unfused_reason(node) for node in nodes}
    for reason in sorted({reason for reason in reasons.values() if reason is not None}):
        logger.warning("TensorRT has no fused attention for %s; its memory will be quadratic in tokens.", reason)
    return [node for node in nodes if reasons[node] is None]


def _unfused_reason(node: ir.Node) -> str | None:
    """What of a node TensorRT has no fused attention for, or None."""
    heads, size = _axis(node, 2), _axis(node, 3)
    if size is not None and size not in _FUSED_HEAD_DIMS:
        return f"heads of {size}"
    # TensorRT-RTX 1.7.1 fails for one head with a mask (findings/tensorrt_rtx_attention_of_one_head_takes_no_mask.sh).
    return "a single head" if heads == 1 and not is_causal(node) else None


def _axis(node: ir.Node, axis: int) -> int | None:
    """Size of an axis of the query, None when the graph does not say."""
    query = node.inputs[0]
    size = None if query is None or query.shape is None else query.shape[axis]
    return size if isinstance(size, int) else None


def _raise_opset(model: ir.Model) -> None:
    changed = sorted({node.op_type for node in model.graph.all_nodes()} & _CHANGED_SINCE_OPSET_20)
    if changed:
        raise ExportError(
            f"The graph uses {', '.join(changed)}, whose meaning changed before opset {_ATTENTION_OPSET}, "
            "which attention needs.",
            hint=("Build without an engine: ", Setting("targets", "onnx", command="build")),
        )
    opset = model.graph.opset_imports.get("", 0)
    model.graph.opset_imports[""] = max(opset, _ATTENTION_OPSET)
    model.ir_version = max(model.ir_version, _ATTENTION_IR_VERSION)


def _replace_by_attention(node: ir.Node, mask: _Mask, bias: ir.Value | None, dtype: str) -> None:
    op, scores = OpBuilder.before(node), mask.scores
    query, key, value = (transpose_heads_and_tokens(op, state) for state in states_of(node))
    # Rows without any real key are 0 by definition. Zeroed values give that, and here TensorRT can fuse the zeros
    # with the projection before them.
    kept = op.Where(mask.keep, value, mask.zero)
    if bias is not None:
        scores = op.Add(op.Cast(bias, to=ir.DataType[dtype.upper()]), mask.scores)
    attended = op.Attention(query, key, kept, scores, scale=node.attributes["scale"].as_float(), _name=node.name)
    replace_result(node, transpose_heads_and_tokens(op, attended))


def _replace_by_causal_attention(node: ir.Node, packed: PackedTokens, dtype: str) -> None:
    """Replace a node of causal attention: TensorRT's layer takes no mask then, so the sequences are packed."""
    op = OpBuilder.before(node)
    zero = op.Constant(value=ir.tensor(0.0, ir.DataType[dtype.upper()]))
    states = [transpose_heads_and_tokens(op, state) for state in packed.pack(op, states_of(node))]
    attended = op.Attention(*states, scale=node.attributes["scale"].as_float(), is_causal=1, _name=node.name)
    merged = merge_heads(op, transpose_heads_and_tokens(op, attended))
    replace_by_merged(op, node, packed.unpack(op, merged, zero))


class CheckSelections(ir.passes.InPlacePass):
    """Reject a graph that selects more tokens than TensorRT selects; TensorRT's parser would give no reason."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Check the TopK nodes."""
        for graph in (model.graph, *model.functions.values()):
            for node in graph:
                tensor = ir.convenience.get_const_tensor(node.inputs[1]) if node.op_type == "TopK" else None
                count = 0 if tensor is None else int(tensor.numpy().item())
                if count > _MAX_TOP_VALUES:
                    raise ExportError(
                        f"The graph selects up to {count} global tokens of a sequence; TensorRT selects at most "
                        f"{_MAX_TOP_VALUES}.",
                        hint=(
                            "Build with fewer global tokens (",
                            Setting("max_global", _MAX_TOP_VALUES, command="build"),
                            " or less, or ",
                            Setting("attention", "window:W,global:G", command="build"),
                            "), or without an engine: ",
                            Setting("targets", "onnx", command="build"),
                        ),
                    )
        return ir.passes.PassResult(model, modified=False)
