"""The semantics of relative attention, in plain PyTorch.

Source: Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context" (2019), section 3.3, and
Yang et al., "XLNet: Generalized Autoregressive Pretraining for Language Understanding" (2019), section 2.5, for
segments.
"""

from __future__ import annotations

import torch

from hdplugins.attention.relative.operator import OPERATOR


def relative_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_kind: torch.Tensor,
    positions: torch.Tensor,
    content_bias: torch.Tensor,
    position_bias: torch.Tensor,
    segment_scores: torch.Tensor | None = None,
    *,
    causal: int,
    reach: int,
    scale: float,
) -> torch.Tensor:
    """Softmax attention whose scores are of a key's content, and of its distance from the query.

    The keys are those of a memory, followed by those of the sequence: query i is the token of key ``keys - tokens +
    i``. The distance of query i from key j, ``keys - tokens + i - j``, is negative where the key is after the query.
    With row ``tokens - 1 - i + j`` of the positions being that of the distance, the score is::

        scale * ((query[i] + content_bias) . key[j] + (query[i] + position_bias) . positions[tokens - 1 - i + j]
                 + (segment_scores[i] where the token mask codes of both tokens differ))

    Keys of padding are not seen. A query that is padding, or sees no key, has the result 0.

    Args:
        query: [batch, tokens, heads, head_dim], any float dtype, which is also the shape and dtype of the output.
        key: [batch, keys, heads, head_dim], ``keys >= tokens``.
        value: [batch, keys, heads, head_dim].
        key_kind: [batch, keys], int32, 0 for padding, and for real tokens 1 or more: their segment, and 1.
        positions: [heads, distances, head_dim], of the distances ``keys - 1`` (row 0), ``keys - 2``, ..., of which
            there are ``keys`` or more where attention is causal, else ``keys + tokens - 1`` or more.
        content_bias: [heads, head_dim], u in the paper.
        position_bias: [heads, head_dim], v in the paper.
        segment_scores: [batch, tokens, heads], what is added to a query's products with keys of other segments; None
            for nothing.
        causal: 1 if queries see no key after them, else 0.
        reach: number of distances that a query sees, with distance 0; 0 for all. Keys after the query are not
            affected.
        scale: factor of the scores, usually head_dim ** -0.5.

    Raises:
        ValueError: an attribute is out of its range, or there are too few keys or distances.
    """
    tokens, keys = query.shape[1], key.shape[1]
    OPERATOR.check(causal=causal, reach=reach)
    if keys < tokens:
        raise ValueError(f"There are {keys} keys for {tokens} tokens; keys must include the tokens of the sequence.")
    needed = keys if causal else keys + tokens - 1
    if positions.shape[1] < needed:
        raise ValueError(f"positions has {positions.shape[1]} distances; {needed} are needed.")
    queries = torch.arange(tokens, device=query.device)[:, None]
    others = torch.arange(keys, device=query.device)[None, :]
    distance = keys - tokens + queries - others  # [tokens, keys]
    # Distances that are not seen have no row where attention is causal.
    row = (keys - 1 - distance).clamp(max=positions.shape[1] - 1)
    content = torch.einsum("bihd,bjhd->bhij", query + content_bias, key)
    by_row = torch.einsum("bihd,hpd->bhip", query + position_bias, positions)
    scores = content + by_row.gather(3, row.expand(*content.shape))
    own_kind = key_kind[:, keys - tokens :]  # [batch, tokens]
    if segment_scores is not None:
        differs = own_kind[:, None, :, None] != key_kind[:, None, None, :]
        scores = scores + torch.where(differs, segment_scores.transpose(1, 2)[..., None], 0)
    hidden = (key_kind == 0)[:, None, None, :]
    if causal:
        hidden = hidden | (distance < 0)
    if reach:
        hidden = hidden | (distance >= reach)
    # A query that sees nothing has NaN for weights; it is defined as 0, as is one of padding.
    weights = torch.softmax((scores * scale).masked_fill(hidden, -torch.inf), dim=-1)
    weights = torch.nan_to_num(weights, nan=0.0).masked_fill((own_kind == 0)[:, None, :, None], 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, value)
