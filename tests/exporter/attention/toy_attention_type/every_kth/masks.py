"""What layers are given for a mask: of the graph, and of PyTorch, which the graph is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hdexport.attention.reference_attention import PairCounts


@dataclass(frozen=True)
class StepMask:
    """Attends by standard operators."""

    step: int
    real: torch.Tensor  # [batch, tokens], bool

    def attend(self, module, query, key, value, scale):
        place = torch.arange(query.shape[1], device=query.device)
        near = (place[:, None] - place[None, :]) % self.step == 0  # [tokens, tokens]
        seen = near & self.real[:, None, None, :]  # [batch, 1, tokens, tokens]
        query, key, value = (states.transpose(1, 2) for states in (query, key, value))  # [batch, heads, tokens, ...]
        scores = (query @ key.transpose(2, 3) * scale).float().masked_fill(~seen, -1.0e30)
        weights = torch.softmax(scores, dim=-1) * seen
        return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class StepCounts(PairCounts):
    """Which queries see which keys, looked up pair by pair."""

    step: int
    real: torch.Tensor

    def of_queries(self, module, queries):
        places = range(self.real.shape[1])
        rows = [[float(abs(query - key) % self.step == 0) for key in places] for query in places[queries]]
        return torch.tensor(rows)[None, None] * self.real[:, None, None, :]
