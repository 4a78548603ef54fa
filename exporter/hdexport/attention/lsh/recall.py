"""How many of the keys that matter LSH attention shows to a query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from hdplugins.attention.chunks.operator import padded_tokens
from hdplugins.attention.chunks.reference import neighbours
from hdplugins.attention.lsh.reference import hash_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hdexport.attention.lsh.kind import LshAttention

_TOP = 16
"""Keys of each query that matter."""


def recall(
    model: PreTrainedModel, record: LshAttention, rotations: torch.Tensor, input_ids: torch.Tensor
) -> Iterator[str]:
    """A line on the keys with the largest scores that hashes find, over all layers, heads and queries of a text.

    Args:
        model: whose attention is the library's Reformer's; see `hdexport.attention.lsh.model`.
        record: the attention.
        rotations: [heads, head_dim, rounds, directions], float32.
        input_ids: [1, tokens].
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found: list[torch.Tensor] = []
    top = min(_TOP, input_ids.shape[1] - 1)
    if top < 1:
        return
    name = model.config._attn_implementation
    attend = ALL_ATTENTION_FUNCTIONS[name]

    def watch(module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(_share(query, rotations, record, top))
        return attend(module, query, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(name, watch)
    try:
        with torch.inference_mode():
            model.base_model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids))
    finally:
        ALL_ATTENTION_FUNCTIONS.register(name, attend)
    shares = torch.stack(found)
    yield (
        f"LSH attention sees {shares.mean():.0%} of the {top} keys with the largest scores of each query; by layer "
        f"{shares.min():.0%} to {shares.max():.0%}"
    )


def _share(query: torch.Tensor, rotations: torch.Tensor, record: LshAttention, top: int) -> torch.Tensor:
    """Share, [], of its `top` nearest keys that a query of [1, heads, tokens, head_dim] sees."""
    keys = torch.nn.functional.normalize(query[0], dim=-1)
    scores = query[0] @ keys.mT  # [heads, tokens, tokens]
    scores.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
    largest = scores.topk(top, dim=-1).indices
    return _seen(query, rotations, record).gather(2, largest).float().mean()


def _seen(query: torch.Tensor, rotations: torch.Tensor, record: LshAttention) -> torch.Tensor:
    """[heads, tokens, tokens], bool, which keys a query sees in any round."""
    hashes, chunks = record.hashes, record.hashed
    assert hashes is not None
    assert chunks is not None
    heads, tokens = query.shape[1:3]
    padded = padded_tokens(tokens, record.multiple)
    buckets = hash_tokens(query, rotations, hashes.buckets)[0]  # [heads, rounds, tokens]
    buckets = torch.nn.functional.pad(buckets, (0, padded - tokens), value=int(buckets.max()) + 1)
    sorted_tokens = buckets.argsort(stable=True, dim=-1).flatten(1).unflatten(1, (-1, chunks.tokens))
    table = neighbours(sorted_tokens.shape[1], chunks.before, chunks.after)
    seen = torch.zeros(heads, padded, padded, dtype=torch.bool)
    for head, of_head in enumerate(sorted_tokens):
        seen[head, of_head[:, :, None], of_head[table].flatten(1)[:, None, :]] = True
    return seen[:, :tokens, :tokens]
