"""sentence-transformers' Pooling in float32, whose tokens may be chosen for each text."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hdexport.checkpoint.sentence_modules import TOKENS

Features = dict[str, torch.Tensor]
"""Name of a feature in sentence-transformers -> its values, as its modules take and give them."""

SENTENCE = "sentence_embedding"
"""sentence-transformers' name of a text's vector."""

POOLED_MASK = "pooled_mask"
"""The feature, [batch, tokens], int64, that is 1 for tokens that are pooled."""


class PoolingModule(torch.nn.Module):
    """Pools the tokens of each row to one vector.

    The library's own module leaves out a prompt of the same length in all rows, and sums a row's tokens with its
    padding.

    Args:
        modes: names, whose results are concatenated.
    """

    def __init__(self, modes: tuple[str, ...]) -> None:
        super().__init__()
        self.modes = modes

    def forward(self, features: Features) -> Features:
        """The features with `SENTENCE`, [batch, width], float32.

        Args:
            features: ``token_embeddings``, [batch, tokens, hidden_size], float32; ``attention_mask``, [batch, tokens],
                int64, 1 for real tokens; `POOLED_MASK`.
        """
        tokens, mask, pooled = features[TOKENS], features["attention_mask"], features[POOLED_MASK]
        return {**features, SENTENCE: torch.cat([_POOLS[mode](tokens, pooled, mask) for mode in self.modes], dim=-1)}


def _first(token_embeddings: torch.Tensor, read: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The first token that is pooled, wherever padding is: [batch, width]."""
    return _token(token_embeddings, read.argmax(dim=1))


def _last(token_embeddings: torch.Tensor, read: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The last token that is pooled, and 0 without one."""
    positions = torch.arange(read.shape[1], device=read.device)
    last = _token(token_embeddings, (read * positions).argmax(dim=1))
    return torch.where(read.sum(dim=1, keepdim=True) > 0, last, 0.0)


def _token(token_embeddings: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    index = number[:, None, None].expand(-1, 1, token_embeddings.shape[-1])
    return token_embeddings.gather(1, index).squeeze(1)


def _largest(token_embeddings: torch.Tensor, read: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    lowest = torch.finfo(token_embeddings.dtype).min
    return torch.where(read.unsqueeze(-1) > 0, token_embeddings, lowest).amax(dim=1)


def _mean(token_embeddings: torch.Tensor, read: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    return _weighted(token_embeddings, read.to(token_embeddings.dtype))


def _mean_by_root(token_embeddings: torch.Tensor, read: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The sum of the tokens over the root of their number."""
    weights = read.to(token_embeddings.dtype)
    return _weighted(token_embeddings, weights) * weights.sum(dim=1, keepdim=True).sqrt()


def _by_position(token_embeddings: torch.Tensor, read: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The mean with weights 1, 2, 3, ... from the first real token on, one that is pooled or not."""
    positions = torch.arange(1, read.shape[1] + 1, device=read.device) - attention_mask.argmax(dim=1, keepdim=True)
    return _weighted(token_embeddings, (read * positions).to(token_embeddings.dtype))


def _weighted(token_embeddings: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The mean of [batch, tokens, width] with weights [batch, tokens], no less than 1 in all, or 0."""
    total = (token_embeddings * weights.unsqueeze(-1)).sum(dim=1)
    return total / weights.sum(dim=1, keepdim=True).clamp(min=1.0)


_POOLS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": _first,
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _by_position,
    "lasttoken": _last,
}
"""Mode -> (tokens' vectors [batch, tokens, width], mask of pooled tokens, mask of real tokens) -> vectors."""
