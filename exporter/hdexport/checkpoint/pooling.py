"""sentence-transformers' Pooling and SpladePooling in float32, whose tokens may be chosen for each text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch

from hdexport.checkpoint.bge_m3 import reject_head
from hdexport.checkpoint.sentence_modules import TOKENS, sentence_modules
from hdexport.model.graph_module import Head
from hdexport.support.json_files import read_settings
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError, Setting
from hdruntime.text.pooling import PoolingMode

Features = dict[str, torch.Tensor]
"""Name of a feature in sentence-transformers -> its values, as its modules take and give them."""

SENTENCE = "sentence_embedding"
"""sentence-transformers' name of a text's vector."""

POOLED_MASK = "pooled_mask"
"""The feature, [batch, tokens], int64, that is 1 for tokens that are pooled."""

MODULES_OF_MODELS = ("Transformer", "MLMTransformer")
"""Modules that run a model of transformers, by the names of sentence-transformers 6 and, for logits, 5."""

_SUMS = 16


class Pooling(torch.nn.Module):
    """Pools the tokens of each row to one vector, the results of all modes concatenated. sentence-transformers' Pooling
    leaves out a prompt of one length in all rows, and its sums of a row include padding."""

    def __init__(self, modes: tuple[PoolingMode, ...]) -> None:
        super().__init__()
        self.modes = modes

    def forward(self, features: Features) -> Features:
        """The features with `SENTENCE`, [batch, width], float32, from ``token_embeddings``, [batch, tokens,
        hidden_size], ``attention_mask`` and `POOLED_MASK`."""
        tokens, mask, pooled = features[TOKENS], features["attention_mask"], features[POOLED_MASK]
        return {**features, SENTENCE: torch.cat([_POOLS[mode](tokens, pooled, mask) for mode in self.modes], dim=-1)}


@dataclass(frozen=True, kw_only=True)
class _Config:
    """Keys of SpladePooling's ``config.json`` that are read."""

    pooling_strategy: Literal["max", "sum"] = "max"
    activation_function: Literal["relu", "log1p_relu"] = "relu"


SPLADE_KEYS = frozenset({
    *(field.name for field in fields(_Config)),
    *("embedding_dimension", "word_embedding_dimension", "chunk_size"),
})  # fmt: skip
"""Keys of that file: settings, widths, and the chunk size of a program."""


class SpladePooling(Head):
    """Pools the weights that a text's tokens give to each token of the vocabulary.

    Args:
        activation: ``relu`` for log(1 + relu(logit)), ``log1p_relu`` for log(1 + log(1 + relu(logit))).
        strategy: ``max`` for the largest weight, of SPLADE v2 and later; ``sum`` for their sum, of the first SPLADE.
    """

    reads = "logits"

    def __init__(self, activation: str = "relu", strategy: str = "max") -> None:
        super().__init__()
        self.activation, self.strategy = activation, strategy

    def outputs(
        self, states: torch.Tensor, attention_mask: torch.Tensor, pooled_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """The weights alone; see `Head.outputs`."""
        # Only pooled logits become float32, because all logits of a long text take gigabytes.
        return (self(states, attention_mask if pooled_mask is None else pooled_mask),)

    def forward(self, logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Pools logits, [batch, tokens, vocab_size], of the tokens where the mask, [batch, tokens], is 1: [batch,
        vocab_size], float32, not negative; 0 for a row without such tokens."""
        # Padding counts as a logit of 0, whose weight is 0: a product would make NaN of a NaN in the padding.
        kept = torch.where(mask.unsqueeze(-1) > 0, logits, 0.0)
        if self.strategy == "sum":
            return _sum(self._weights(kept.float()), mask)
        # Weights grow with the logit, so that the largest logit has the largest weight.
        return self._weights(kept.amax(dim=1).float())

    def _weights(self, logits: torch.Tensor) -> torch.Tensor:
        """Weights of logits, computed in place, because all tokens' are large."""
        weights = logits.relu_().log1p_()
        return weights.log1p_() if self.activation == "log1p_relu" else weights


def splade_pooling(path: Path) -> SpladePooling:
    """The pooling of a checkpoint with a masked language model's head; SPLADE v2's, the largest weight, where its files
    name none."""
    modules = sentence_modules(path)
    kinds = [module.kind for module in modules]
    if "SpladePooling" not in kinds:
        reject_head(path, Task.SPARSE_SIMILARITY)
    if not modules:
        return SpladePooling()
    if len(kinds) != 2 or kinds[0] not in MODULES_OF_MODELS or kinds[1] != "SpladePooling":
        raise ModelError(
            f"{path} chains the modules {', '.join(kinds)}; for sparse embeddings, a Transformer with the task "
            "fill-mask followed by a SpladePooling is supported.",
            hint=(
                "Choose a SPLADE model of that form, or build its Transformer alone: ",
                Setting("task", "feature-extraction"),
            ),
        )
    file = path / modules[1].folder / "config.json"
    config = read_settings(file, _Config)
    return SpladePooling(config.activation_function, config.pooling_strategy)


def _cls(token_embeddings: torch.Tensor, pooled_mask: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The first token that is pooled, wherever padding is: [batch, width]."""
    return _token(token_embeddings, pooled_mask.argmax(dim=1))


def _last_token(
    token_embeddings: torch.Tensor, pooled_mask: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """The last token that is pooled, and 0 without one."""
    positions = torch.arange(pooled_mask.shape[1], device=pooled_mask.device)
    last = _token(token_embeddings, (pooled_mask * positions).argmax(dim=1))
    return torch.where(pooled_mask.sum(dim=1, keepdim=True) > 0, last, 0.0)


def _token(token_embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    index = positions[:, None, None].expand(-1, 1, token_embeddings.shape[-1])
    return token_embeddings.gather(1, index).squeeze(1)


def _max(token_embeddings: torch.Tensor, pooled_mask: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    lowest = torch.finfo(token_embeddings.dtype).min
    return torch.where(pooled_mask.unsqueeze(-1) > 0, token_embeddings, lowest).amax(dim=1)


def _mean(token_embeddings: torch.Tensor, pooled_mask: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    return _mean_with_weights(token_embeddings, pooled_mask.to(token_embeddings.dtype))


def _mean_sqrt_len_tokens(
    token_embeddings: torch.Tensor, pooled_mask: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """The sum of the tokens divided by the square root of their number."""
    weights = pooled_mask.to(token_embeddings.dtype)
    return _mean_with_weights(token_embeddings, weights) * weights.sum(dim=1, keepdim=True).sqrt()


def _weighted_mean(
    token_embeddings: torch.Tensor, pooled_mask: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """The mean with weights 1, 2, 3, ... from the first real token on, whether that is pooled or not."""
    columns = torch.arange(1, pooled_mask.shape[1] + 1, device=pooled_mask.device)
    positions = columns - attention_mask.argmax(dim=1, keepdim=True)
    return _mean_with_weights(token_embeddings, (pooled_mask * positions).to(token_embeddings.dtype))


def _mean_with_weights(token_embeddings: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The mean of [batch, tokens, width] with weights [batch, tokens] whose sum is 1 or more; 0 where it is 0."""
    total = (token_embeddings * weights.unsqueeze(-1)).sum(dim=1)
    return total / weights.sum(dim=1, keepdim=True).clamp(min=1.0)


_POOLS: dict[PoolingMode, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    PoolingMode.CLS: _cls,
    PoolingMode.MAX: _max,
    PoolingMode.MEAN: _mean,
    PoolingMode.MEAN_SQRT_LEN_TOKENS: _mean_sqrt_len_tokens,
    PoolingMode.WEIGHTED_MEAN: _weighted_mean,
    PoolingMode.LAST_TOKEN: _last_token,
}
"""Mode -> (token embeddings [batch, tokens, width], mask of pooled tokens, mask of real tokens) -> [batch, width]."""


def _sum(weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[batch, vocab_size]: the sum of the weights, [batch, tokens, vocab_size], of tokens that are not masked. It adds
    `_SUMS` sums, each of every 16th token: one after the other, ONNX Runtime adds 4096 weights with an error of 3e-6 of
    their sum."""
    number = torch.arange(mask.shape[1], device=mask.device) % _SUMS
    is_of_sum = number == torch.arange(_SUMS, device=mask.device)[:, None]  # [sums, tokens]
    added = is_of_sum & (mask > 0)[:, None]  # [batch, sums, tokens]
    return (added.to(weights.dtype) @ weights).sum(dim=1)
