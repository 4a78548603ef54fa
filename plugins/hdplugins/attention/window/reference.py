"""The semantics of sliding-window attention, in plain PyTorch with dense masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hdplugins.attention.window.operator import steps_of_heads

_PADDING, _LOCAL, _GLOBAL = 0, 1, 2  # and -1, whose keys are like padding's


def sliding_window_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    token_kind: torch.Tensor,
    *,
    left: int,
    right: int,
    dilation: Sequence[int] = (1,),
    global_bound: int | None = None,
    scale: float,
) -> torch.Tensor:
    """Softmax attention over the local tokens around a query and the global tokens anywhere, each key once.

    A head of dilation D sees the local token j from the query i when ``-left * D <= j - i <= right * D`` and D
    divides ``j - i``. The query of a padding token, and one that sees no key, has the result 0.

    Args:
        query: [batch, tokens, heads, head_dim], any float dtype, which is also the shape and dtype of the output.
        key: [batch, tokens, kv_heads, head_dim]; `heads` is a multiple of `kv_heads`, and head h of the queries sees
            head h // (heads // kv_heads) of the keys.
        value: [batch, tokens, kv_heads, head_dim].
        token_kind: [batch, tokens], int32, 0 for padding, 1 for local tokens, 2 for global ones, which every query
            sees, -1 for unseen ones, whose queries see keys and whose keys no query sees.
        left: steps that a window reaches before its query, in units of the dilation, 0 or more.
        right: steps that it reaches after its query, 0 or more.
        dilation: tokens that one step is, 1 or more: one value per head, or a single one for all heads.
        global_bound: the most global tokens that a sequence may hold; None for any number.
        scale: factor of the scores, usually head_dim ** -0.5.

    Raises:
        ValueError: an invalid window or dilation, heads that are no multiple of the key's, or a sequence with more
        global
            tokens than the bound.
    """
    tokens, heads = query.shape[1:3]
    steps = steps_of_heads(dilation, heads)
    if left < 0 or right < 0:
        raise ValueError(f"A window of {left} left and {right} right is invalid: both are 0 or more.")
    if heads % key.shape[2]:
        raise ValueError(f"{heads} heads of queries are no multiple of {key.shape[2]} heads of keys.")
    group = heads // key.shape[2]
    key, value = key.repeat_interleave(group, dim=2), value.repeat_interleave(group, dim=2)
    most = int((token_kind == _GLOBAL).sum(dim=1).max())
    if global_bound is not None and most > global_bound:
        raise ValueError(f"A sequence has {most} global tokens; global_bound is {global_bound}.")
    positions = torch.arange(tokens, device=query.device)
    offset = (positions[None, :] - positions[:, None])[None]  # [1, queries, keys]
    step = torch.tensor(steps, device=query.device)[:, None, None]  # [heads, 1, 1]
    near = (offset >= -left * step) & (offset <= right * step) & (offset % step == 0)
    kinds = token_kind[:, None, None, :]  # [batch, 1, 1, keys]
    seen = (kinds == _GLOBAL) | ((kinds == _LOCAL) & near)  # [batch, heads, queries, keys]
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    # The softmax of a query that sees no key is NaN.
    unanswered = (token_kind == _PADDING)[:, None, :, None] | ~seen.any(dim=-1, keepdim=True)
    weights = torch.softmax(scores, dim=-1).masked_fill(unanswered, 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, value)
