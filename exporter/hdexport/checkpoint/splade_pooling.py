"""SPLADE's pooling of a model's logits: a weight for each token of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch

from hdexport.checkpoint.sentence_modules import sentence_modules
from hdexport.model.head import Head
from hdexport.support.json_files import read_settings
from hdruntime.errors import ModelError

MODULES_OF_MODELS = ("Transformer", "MLMTransformer")
"""Modules that run a model of transformers, by the names of sentence-transformers 6 and, for logits, 5."""

_SUMS = 16


@dataclass(frozen=True, kw_only=True)
class _Config:
    """Keys of the pooling's ``config.json`` that are read; other keys change nothing."""

    pooling_strategy: Literal["max", "sum"] = "max"
    activation_function: Literal["relu", "log1p_relu"] = "relu"


SPLADE_KEYS = frozenset({
    *(field.name for field in fields(_Config)),
    *("embedding_dimension", "word_embedding_dimension", "chunk_size"),
})  # fmt: skip
"""Keys of that file, the widths and the memory of a program included."""


class SpladePooling(Head):
    """Pools the weights that a text's tokens give to each token of the vocabulary.

    Args:
        activation: ``relu`` for log(1 + relu(logit)), ``log1p_relu`` for log(1 + log(1 + relu(logit))).
        strategy: ``max`` for the largest weight, of SPLADE v2 and later, ``sum`` for their sum, of the first SPLADE.
    """

    reads = "logits"

    def __init__(self, activation: str = "relu", strategy: str = "max") -> None:
        super().__init__()
        self.activation, self.strategy = activation, strategy

    def outputs(
        self, states: torch.Tensor, attention_mask: torch.Tensor, pooled_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """The weights alone; see `Head.outputs`."""
        # Not all logits in float32 where their maximum does: a long text's logits take gigabytes.
        return (self(states, attention_mask if pooled_mask is None else pooled_mask),)

    def forward(self, logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Pool.

        Args:
            logits: [batch, tokens, vocab_size].
            mask: [batch, tokens], int64, 1 for tokens that are pooled.

        Returns:
            [batch, vocab_size], float32, not negative; 0 for a row without such tokens.
        """
        # Padding counts as a logit of 0, whose weight is 0: a product would make NaN of a NaN in the padding.
        kept = torch.where(mask.unsqueeze(-1) > 0, logits, 0.0)
        if self.strategy == "sum":
            return _sum(self._weights(kept.float()), mask)
        # Weights grow with the logit, so that the largest logit has the largest weight.
        return self._weights(kept.amax(dim=1).float())

    def _weights(self, logits: torch.Tensor) -> torch.Tensor:
        """Weights of logits, computed in place: all tokens' are large."""
        weights = logits.relu_().log1p_()
        return weights.log1p_() if self.activation == "log1p_relu" else weights


def _sum(weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[batch, vocab_size], of the weights of tokens, [batch, tokens, vocab_size], that are not masked.

    `_SUMS` sums, of every so many tokens, and then theirs: one after the other, ONNX Runtime adds 4096 weights with an
    error of 3e-6 of their sum.
    """
    number = torch.arange(mask.shape[1], device=mask.device) % _SUMS
    is_of_sum = number == torch.arange(_SUMS, device=mask.device)[:, None]  # [sums, tokens]
    added = is_of_sum & (mask > 0)[:, None]  # [batch, sums, tokens]
    return (added.to(weights.dtype) @ weights).sum(dim=1)


def splade_pooling(path: Path) -> SpladePooling:
    """The pooling of a checkpoint, by default SPLADE v2's and later ones', the largest weight.

    Args:
        path: a checkpoint with a masked language model's head, of sentence-transformers or without its files.

    Raises:
        ModelError: a module or a setting of one is not supported, or a file cannot be read.
    """
    modules = sentence_modules(path)
    kinds = [module.kind for module in modules]
    if not modules:
        return SpladePooling()
    if len(kinds) != 2 or kinds[0] not in MODULES_OF_MODELS or kinds[1] != "SpladePooling":
        raise ModelError(
            f"{path} chains the modules {', '.join(kinds)}; for sparse vectors, a Transformer with the task fill-mask "
            "followed by a SpladePooling is supported.\n"
            "Choose a SPLADE model of that form, or build its Transformer alone: --task feature-extraction"
        )
    file = path / modules[1].folder / "config.json"
    config = read_settings(file, _Config)
    return SpladePooling(config.activation_function, config.pooling_strategy)
