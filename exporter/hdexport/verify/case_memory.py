"""The memory that a case of a verification takes: outputs and attention scores."""

from __future__ import annotations

import math

from hdexport.attention.registry import Attention, attention_of
from hdexport.families import family_of
from hdexport.model.task import TASKS, supports_sdpa
from hdexport.verify.graph_sets import GraphSet
from hdruntime.bundle.manifest import Manifest, TensorSpec
from hdruntime.bundle.verification import Case
from hdruntime.constants import PORTABLE_LOWERING

_VALUE_BYTES = 4
"""All outputs and scores are float32, or computed in it."""

_OUTPUT_COPIES = 2
"""Copies of a graph's output: the computed one, and the one assembled from rows or the product before a cast."""

_POOLED_COPIES = 2
"""Copies of all tokens' logits, which the portable graph and PyTorch hold where logits are pooled: the product, and the
product without padding."""

_SCORE_COPIES = 3
"""Copies of attention scores: scores with the mask, the softmax, and a copy made of either."""


def arrays_bytes(case: Case, manifest: Manifest, *, samples: int | None = None) -> int:
    """Memory of one graph's outputs and PyTorch's; `samples` is the number of tokens whose logits are computed, None
    for all."""
    total = 0
    for spec in manifest.outputs:
        graph_values = case.batch * (_tokens_axis(spec, case.tokens) if samples is None else samples)
        # PyTorch's rows are as long as their texts, unless only the padded batch has an answer.
        reference_values = sum(_tokens_axis(spec, length) if samples is None else samples for length in case.lengths)
        features = math.prod(axis for axis in spec.shape if isinstance(axis, int))
        total += (_OUTPUT_COPIES * graph_values + reference_values) * features * _VALUE_BYTES
    if TASKS[manifest.task].pools_logits:
        total += _POOLED_COPIES * case.batch * case.tokens * manifest.vocab_size * _VALUE_BYTES
    if samples is not None:
        head_input = (_OUTPUT_COPIES * case.batch * case.tokens + sum(case.lengths)) * manifest.hidden_size
        total += head_input * _VALUE_BYTES
    return total


def scores_bytes(graphs: GraphSet, case: Case, manifest: Manifest, *, cuts_padding: bool = True) -> int:
    """Memory of one layer's attention scores, in a graph or in PyTorch, the larger of both; `cuts_padding` is whether
    the graph runs in the runtime, which cuts padding off."""
    return max(_scores_bytes_of_graph(graphs, case, manifest, cuts_padding), _scores_bytes_of_reference(case, manifest))


def _tokens_axis(spec: TensorSpec, tokens: int) -> int:
    return tokens if "tokens" in spec.shape else 1


def _scores_bytes_of_graph(graphs: GraphSet, case: Case, manifest: Manifest, cuts_padding: bool) -> int:
    """0 where scores are never materialised, or are in a GPU's memory."""
    if graphs.is_on_gpu:
        return 0
    is_portable = graphs.lowering == PORTABLE_LOWERING
    # The lowered graph needs a mask, and with it the scores, only where the runtime cannot cut the padding off.
    has_mask = case.padding == "left" or (case.padding == "right" and not cuts_padding)
    if not is_portable and not has_mask:
        return 0
    fuses_masks = graphs.target.fuses_masks
    keys = [
        keys
        for item in attention_of(manifest)
        if is_portable or (item.record.holds_scores and not (fuses_masks and _is_fused(item, graphs.lowering)))
        for keys in item.record.keys_of_layers(manifest, case.tokens)
    ]
    return _SCORE_COPIES * _VALUE_BYTES * case.batch * manifest.num_heads * case.tokens * max(keys, default=0)


def _is_fused(item: Attention, lowering: str | None) -> bool:
    """Whether graphs of a lowering have a fused attention in the place of the type's operators."""
    return any(lowering in each.fused for each in item.type.lowerings)


def _scores_bytes_of_reference(case: Case, manifest: Manifest) -> int:
    """Bytes of one row's scores, because PyTorch gets one row at a time; 0 where it slices scores or never
    holds them."""
    from transformers import CONFIG_MAPPING

    family = family_of(manifest.model_type)
    has_sdpa = family.is_generic or supports_sdpa(CONFIG_MAPPING[manifest.model_type](), family=family)
    copies = (item.record.reference_copies(manifest.num_heads, has_sdpa=has_sdpa) for item in attention_of(manifest))
    return max(copies, default=0) * _VALUE_BYTES * case.tokens**2
