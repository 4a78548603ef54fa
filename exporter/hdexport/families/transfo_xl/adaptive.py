"""Adaptive embeddings and softmax: clusters of tokens, the rarer the narrower, without operators that pick tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from hdexport.families.transfo_xl.config import TransfoXLConfig


class AdaptiveEmbedding(torch.nn.Module):
    """A table and a projection per cluster; its weights have the names of transformers 4."""

    def __init__(self, config: TransfoXLConfig) -> None:
        super().__init__()
        self.firsts = (0,) if config.div_val == 1 else tuple(config.ends[:-1])
        self.scale = config.d_model**0.5
        self.emb_layers = torch.nn.ModuleList(torch.nn.Embedding(*shape) for shape in _tables(config))
        self.emb_projs = torch.nn.ParameterList()
        if config.div_val > 1 or config.d_model != config.d_embed:
            widths = [width for _, width in _tables(config)]
            self.emb_projs.extend(torch.nn.Parameter(torch.empty(config.d_model, width)) for width in widths)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Embed ids, [batch, tokens], int64: [batch, tokens, d_model].

        Every cluster embeds all of them, the ids of others clamped to its own.
        """
        embedded = self._cluster(0, ids)
        for index in range(1, len(self.emb_layers)):
            is_of_cluster = (ids >= self.firsts[index]).unsqueeze(-1)
            embedded = torch.where(is_of_cluster, self._cluster(index, ids), embedded)
        return embedded * self.scale

    def _cluster(self, index: int, ids: torch.Tensor) -> torch.Tensor:
        table: Any = self.emb_layers[index]
        rows = table((ids - self.firsts[index]).clamp(0, table.num_embeddings - 1))
        return torch.nn.functional.linear(rows, self.emb_projs[index]) if len(self.emb_projs) else rows


class AdaptiveSoftmax(torch.nn.Module):
    """The probability of a token: its cluster's, times the token's within the cluster.

    The first cluster shares its softmax with one logit for each of the others. Weights are named as in transformers 4.
    """

    most_logits = 16384
    """Logits of a token that are in memory at once."""

    def __init__(self, config: TransfoXLConfig) -> None:
        super().__init__()
        self.bounds, self.is_one_table = tuple(pairwise(config.ends)), config.div_val == 1
        others = len(self.bounds) - 1
        if others:
            self.cluster_weight = torch.nn.Parameter(torch.zeros(others, config.d_embed))
            self.cluster_bias = torch.nn.Parameter(torch.zeros(others))
        self.out_layers = torch.nn.ModuleList(torch.nn.Linear(width, rows) for rows, width in _tables(config))
        self.out_projs = torch.nn.ParameterList()
        if not self.is_one_table or config.d_model != config.d_embed:
            widths = [config.d_embed // config.div_val**index for index in range(others + 1)]
            self.out_projs.extend(torch.nn.Parameter(torch.empty(config.d_model, width)) for width in widths)

    def forward(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The log-probability, [batch, tokens], float32, of one token per state, [batch, tokens, d_model]."""
        head = self._projected(states, 0)
        normaliser, logits = [self._log_sum(head, 0)], self._logit(head, tokens, 0)
        if len(self.bounds) > 1:
            clusters = torch.nn.functional.linear(head, self.cluster_weight, self.cluster_bias).float()
            normaliser.append(clusters.logsumexp(-1))
        for index, (first, _) in enumerate(self.bounds[1:], start=1):
            tail = self._projected(states, index)
            within = self._logit(tail, tokens, index) - self._log_sum(tail, index)
            logits = torch.where(tokens >= first, clusters[..., index - 1] + within, logits)
        return logits - torch.stack(normaliser).logsumexp(0)

    def _projected(self, states: torch.Tensor, index: int) -> torch.Tensor:
        return states @ self.out_projs[index] if len(self.out_projs) else states

    def _rows(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight [rows, width] and bias [rows] of a cluster."""
        layer: Any = self.out_layers[0 if self.is_one_table else index]
        first, end = self.bounds[index] if self.is_one_table else (0, None)
        return layer.weight[first:end], layer.bias[first:end]

    def _chunks(self, index: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        weight, bias = self._rows(index)
        for first in range(0, len(weight), self.most_logits):
            yield weight[first : first + self.most_logits], bias[first : first + self.most_logits]

    def _log_sum(self, projected: torch.Tensor, index: int) -> torch.Tensor:
        """[batch, tokens], float32, of a cluster's logits."""
        parts = [
            torch.nn.functional.linear(projected, weight, bias).float().logsumexp(-1)
            for weight, bias in self._chunks(index)
        ]
        return torch.stack(parts).logsumexp(0) if len(parts) > 1 else parts[0]

    def _logit(self, projected: torch.Tensor, tokens: torch.Tensor, index: int) -> torch.Tensor:
        """[batch, tokens], float32, each token's own; of no meaning where it is of another cluster."""
        first, end = self.bounds[index]
        weight, bias = self._rows(index)
        row = (tokens - first).clamp(0, end - first - 1)
        products = projected.float() * torch.nn.functional.embedding(row, weight).float()
        return products.sum(-1) + bias[row].float()


def _tables(config: TransfoXLConfig) -> list[tuple[int, int]]:
    """Rows and width of each table."""
    if config.div_val == 1:
        return [(config.vocab_size, config.d_embed)]
    return [
        (end - first, config.d_embed // config.div_val**index)
        for index, (first, end) in enumerate(pairwise(config.ends))
    ]
