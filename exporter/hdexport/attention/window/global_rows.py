"""The rows of global tokens: a few queries that attend to the whole text, put over their windows' results.

Everything here is standard operators, [global tokens, tokens] at most: linear in tokens for a bounded number of global
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_LOCAL, _GLOBAL = 1, 2

_MASKED_SCORE = -1.0e30
"""Finite, so that nothing meets inf - inf; exp() of it is exactly 0 beside any real score. Scores are float32."""


_FEW_SLOTS = 2
"""Slots up to which `attend_to_all` is one product of all heads. CPU milliseconds of 12 heads of 64 in ONNX Runtime
1.31.1 on one core of an AMD EPYC (2026-11-28), by heads and in one product:

=====  ============  ============
slots  512 tokens    4096 tokens
=====  ============  ============
1      0.23, 0.16    4.8, 2.6
2      0.26, 0.24    5.2, 3.4
4      0.27, 0.39    5.2, 4.5
16     0.37, 1.31    7.1, 12.2
=====  ============  ============
"""


@dataclass(frozen=True)
class GlobalRows:
    """The places of the global tokens of each text.

    Attributes:
        index: [batch, slots], int64. Slots beyond a text's number of global tokens repeat one of them; in a text
            without any they name tokens whose rows stay as they are.
        present: [batch, 1, 1, 1], bool, whether the text has a global token.
    """

    index: torch.Tensor
    present: torch.Tensor

    def of(self, states: torch.Tensor) -> torch.Tensor:
        """The global tokens' rows of states, [batch, tokens, ...]: [batch, slots, ...]."""
        shape = states.shape[2:]
        return states.gather(1, self.index.unflatten(1, (-1, *[1] * len(shape))).expand(-1, -1, *shape))


def find_global_rows(token_kind: torch.Tensor, bound: int) -> GlobalRows:
    """Find the global tokens: kind 2 in [batch, tokens], int32, at most `bound` of them per text.

    The bound, 1 or more, is a constant of the graph.
    """
    # TopK needs at least as many values as it returns, at any length of the text: hence the padding.
    kinds = torch.nn.functional.pad(token_kind.float(), (0, bound))
    top, index = torch.topk(kinds, bound, dim=1)
    filled = top == _GLOBAL
    first = index[:, :1].clamp(max=token_kind.shape[1] - 1)
    return GlobalRows(torch.where(filled, index, first), filled[:, :1, None, None])


def attend_to_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, token_kind: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Attention of a few queries over all real tokens, its softmax in float32.

    Args:
        query: [batch, slots, heads, head_dim]; the result has the same shape and dtype.
        key, value: [batch, tokens, heads, head_dim].
        token_kind: [batch, tokens], int32, 0 for padding.
    """
    if query.shape[1] <= _FEW_SLOTS:
        return _attend_in_one_product(query, key, value, token_kind, scale=scale)
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    # The few queries are transposed for the product, and its few columns: keys would be copied by single numbers.
    scores = (key @ (query * scale).transpose(2, 3)).transpose(2, 3)  # [batch, heads, slots, tokens]
    return (softmax_over_real_tokens(scores, token_kind).to(value.dtype) @ value).transpose(1, 2)


def _attend_in_one_product(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, token_kind: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """`attend_to_all` with keys and values where projections left them.

    Heads and slots are rows of one product, which are 0 outside of their own head's columns: heads times the
    multiplications, and no copy of keys and values with heads before tokens.
    """
    heads, head_dim = query.shape[2:]
    own_columns = torch.eye(heads, dtype=query.dtype).repeat_interleave(head_dim, dim=1)  # [heads, width]
    rows = ((query * scale).flatten(2).unsqueeze(2) * own_columns).flatten(1, 2)  # [batch, slots * heads, width]
    scores = rows @ key.flatten(2).transpose(1, 2)  # [batch, slots * heads, tokens]
    weights = softmax_over_real_tokens(scores.unsqueeze(1), token_kind).squeeze(1).to(value.dtype)
    sums = (weights @ value.flatten(2)).unflatten(1, (-1, heads)) * own_columns  # [batch, slots, heads, width]
    return sums.unflatten(3, (heads, head_dim)).sum(2)


def attend_through_projections(
    query: torch.Tensor,
    hidden_states: torch.Tensor,
    token_kind: torch.Tensor,
    *,
    key_weight: torch.Tensor,
    value_weight: torch.Tensor,
    value_bias: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`attend_to_all` over keys K x + b and values V x + c of hidden states x, none of which are computed.

    q . (K x + b) = (K^T q) . x + q . b, and q . b is the same for all keys, so the softmax does not see it; and sum p
    (V x + c) = V (sum p x) + c, because the weights p sum to 1. So one vector per query and head is projected, not one
    per token; see `absorbs_projections`.

    Args:
        query: [batch, slots, heads, head_dim]; the result has the same shape and dtype.
        hidden_states: [batch, tokens, hidden_size].
        token_kind: [batch, tokens], int32, 0 for padding.
        key_weight: [heads, head_dim, hidden_size], K by heads.
        value_weight: [heads, hidden_size, head_dim], V transposed, by heads.
        value_bias: [heads, 1, head_dim], c by heads.
    """
    batch, slots, heads, _ = query.shape
    moved = (query.transpose(1, 2) * scale) @ key_weight  # [batch, heads, slots, hidden_size]
    # Heads and slots are rows of one product: all of them meet the same hidden states.
    scores = moved.flatten(1, 2) @ hidden_states.transpose(1, 2)  # [batch, heads * slots, tokens]
    weights = softmax_over_real_tokens(scores.view(batch, heads, slots, -1), token_kind).to(hidden_states.dtype)
    sums = (weights.flatten(1, 2) @ hidden_states).view(batch, heads, slots, -1)  # [batch, heads, slots, hidden_size]
    return (sums @ value_weight + value_bias).transpose(1, 2)


def absorbs_projections(head_dim: int, *, slots: int) -> bool:
    """Whether `attend_through_projections` is less work than to project all tokens for `attend_to_all`.

    Multiplications per token, with h = heads * head_dim: 2 h^2 for the projections and 2 slots h for the attention;
    against 2 heads slots h. With fewer slots than a head is wide, the latter are fewer, and so is the memory: heads *
    slots scores take the place of h numbers of keys and of values. Four layers of Longformer's base shape, one text of
    4096 tokens, ONNX Runtime 1.31 on one core of an AMD EPYC, best of four runs, seconds and (megabytes of growth):

    =====  ==========  ==========
    slots  projecting  through
    =====  ==========  ==========
    1      1.59 (332)  1.45 (262)
    16     1.57 (327)  1.42 (282)
    64     1.59 (310)  1.59 (359)
    =====  ==========  ==========

    Args:
        head_dim: width of a head.
        slots: queries that the graph has place for; all are computed, also for a text with fewer global tokens.
    """
    return slots < head_dim


def softmax_over_real_tokens(scores: torch.Tensor, token_kind: torch.Tensor) -> torch.Tensor:
    """Weights [batch, heads, slots, tokens], float32, of scores of that shape; padding gets 0."""
    real = (token_kind >= _LOCAL)[:, None, None, :]
    return torch.softmax(scores.float().masked_fill(~real, _MASKED_SCORE), dim=-1)


def overwrite_rows(merged: torch.Tensor, rows: torch.Tensor, where: GlobalRows) -> torch.Tensor:
    """The windows' results, [batch, tokens, heads, head_dim], with the global tokens' rows, [batch, slots, heads,
    head_dim], in place.
    """
    index = where.index[:, :, None, None].expand(-1, -1, *merged.shape[2:])
    rows = torch.where(where.present, rows, merged.gather(1, index))
    # Slots that repeat a token carry the same row, so the order of writing does not matter.
    return merged.scatter(1, index, rows)
