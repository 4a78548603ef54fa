"""The memory that a case takes beside the weights: what graphs and PyTorch put out, and attention scores."""

from __future__ import annotations

__all__ = ["arrays_bytes", "scores_bytes"]

from hdexport.families import family_of
from hdexport.verify.grid import Case
from hdruntime.bundle.manifest import GraphFile, Manifest, TensorSpec
from hdruntime.constants import PORTABLE_LOWERING

_VALUE_BYTES = 4
"""All outputs and scores are float32, or computed in it."""

_OUTPUT_COPIES = 2
"""Of a graph's output: as it was computed, and what the runtime puts together of rows, or the product before a cast."""

_SCORE_COPIES = 3
"""Of attention scores: with the mask added, the softmax, and what is made of either."""

_REFERENCE_COPIES = 6
"""Of one head's scores in the definition of block-sparse attention."""


def arrays_bytes(case: Case, manifest: Manifest, *, samples: int | None = None) -> int:
    """Memory of one graph's outputs and PyTorch's.

    Args:
        case: the input.
        manifest: of the bundle.
        samples: tokens whose logits are computed; None for all.
    """
    total = 0
    for spec in manifest.outputs:
        graph_values = case.batch * (_tokens_axis(spec, case.tokens) if samples is None else samples)
        # A row of PyTorch's is as long as its text, but where only the padded batch has an answer.
        reference_values = sum(_tokens_axis(spec, length) if samples is None else samples for length in case.lengths)
        total += (_OUTPUT_COPIES * graph_values + reference_values) * _features(spec) * _VALUE_BYTES
    if samples is not None:
        head_input = (_OUTPUT_COPIES * case.batch * case.tokens + sum(case.lengths)) * manifest.hidden_size
        total += head_input * _VALUE_BYTES
    return total


def scores_bytes(graph: GraphFile, case: Case, manifest: Manifest, *, is_sampled: bool = False) -> int:
    """Memory of one layer's attention scores, in a graph or in PyTorch, whichever takes more.

    Args:
        graph: which graph.
        case: the input.
        manifest: of the bundle.
        is_sampled: whether the graph runs outside of the runtime, which cuts padding off.
    """
    return max(_scores_bytes_of_graph(graph, case, manifest, is_sampled), _scores_bytes_of_reference(case, manifest))


def _tokens_axis(spec: TensorSpec, tokens: int) -> int:
    return tokens if "tokens" in spec.shape else 1


def _features(spec: TensorSpec) -> int:
    features = 1
    for axis in spec.shape:
        features *= axis if isinstance(axis, int) else 1
    return features


def _scores_bytes_of_graph(graph: GraphFile, case: Case, manifest: Manifest, is_sampled: bool) -> int:
    """0 where they are never materialised."""
    is_portable = graph.lowering == PORTABLE_LOWERING
    # The lowered graph needs a mask, and with it the scores, only where the runtime cannot cut the padding off.
    has_mask = case.padding == "left" or (case.padding == "right" and is_sampled)
    if not is_portable and not has_mask:
        return 0
    has_dense_layers = _has_dense_layers(manifest)
    if not is_portable and not has_dense_layers:
        return 0
    reach = _reach(case.tokens, manifest, has_dense_layers)
    return _SCORE_COPIES * _VALUE_BYTES * case.batch * manifest.num_heads * case.tokens * reach


def _scores_bytes_of_reference(case: Case, manifest: Manifest) -> int:
    """Of one row, as PyTorch is asked about one at a time; 0 where it slices them or never has them."""
    family = family_of(manifest.model_type)
    pairs_bytes = _VALUE_BYTES * case.tokens**2
    if _has_dense_layers(manifest) and not family.has_sdpa:
        return _SCORE_COPIES * manifest.num_heads * pairs_bytes
    has_own_blocks = manifest.block_sparse is not None and family.block_sparse is not None
    if has_own_blocks and manifest.block_sparse is not None and manifest.block_sparse.mode == "table":
        return _REFERENCE_COPIES * pairs_bytes
    return 0


def _has_dense_layers(manifest: Manifest) -> bool:
    return any("DenseAttention" in name for name in manifest.attention)


def _reach(tokens: int, manifest: Manifest, has_dense_layers: bool) -> int:
    """Keys that a query meets in the portable graph, about."""
    if has_dense_layers:
        return tokens
    if manifest.block_sparse is None:
        # A block of a window's queries meets the window and about a quarter of it more.
        return min(tokens, 3 * max(manifest.windows))
    blocks = manifest.block_sparse
    # Five blocks and the random ones of each query; two blocks of queries meet all, which is two more of each.
    return min(tokens, (7 + blocks.random_blocks) * blocks.block_size + blocks.global_tokens)
