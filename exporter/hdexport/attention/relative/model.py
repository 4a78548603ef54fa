"""Relative attention in a traced model: the operator's node, and the distances that layers share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hdexport.attention.model_parts import operator_node
from hdexport.attention.relative.attention_type import RelativeAttention


def relative_node(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_kind: torch.Tensor,
    positions: torch.Tensor,
    content_bias: torch.Tensor,
    position_bias: torch.Tensor,
    segment_scores: torch.Tensor | None = None,
    *,
    record: RelativeAttention,
    scale: float,
) -> torch.Tensor:
    """One ``RelativeAttention`` node; see `operator_node`.

    Args:
        query: [batch, tokens, heads, head_dim]; the result has the same shape and dtype.
        key, value: [batch, memory + tokens, heads, head_dim].
        key_kind: [batch, memory + tokens], int32, 0 for padding, 1 + segment for real tokens.
        positions: [heads, distances, head_dim], as `Distances.seen` gives them.
        content_bias, position_bias: [heads, head_dim].
        segment_scores: [batch, tokens, heads]; None for none.
    """
    attributes = {"causal": int(record.causal), "reach": record.reach, "scale": float(scale)}
    inputs = [query, key, value, key_kind, positions, content_bias, position_bias]
    if segment_scores is not None:
        inputs.append(segment_scores)
    return operator_node("RelativeAttention", inputs, attributes)


@dataclass(frozen=True)
class Distances:
    """The distances that queries of a text of up to `max_len` tokens have from keys, from the farthest key on."""

    record: RelativeAttention
    max_len: int

    @property
    def _longest(self) -> int:
        """Tokens that there are distances for: of a single token no dynamic axis is traced."""
        return max(2, self.max_len)

    @property
    def farthest(self) -> int:
        """The distance of the last query of the longest text from the first key."""
        return self.record.memory + self._longest - 1

    def sinusoids(self, width: int) -> torch.Tensor:
        """[distances, width], float32: sines of each distance, and then cosines, of falling frequency.

        Source: Transformer-XL, section 3.3; the paper's R.
        """
        behind = 0 if self.record.causal else self._longest - 1
        distance = torch.arange(self.farthest, -behind - 1, -1, dtype=torch.float32)
        if self.record.clamp:
            distance = distance.clamp(-self.record.clamp, self.record.clamp)
        frequency = 1 / 10000 ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        angle = distance[:, None] * frequency
        return torch.cat([angle.sin(), angle.cos()], dim=1)

    def seen(self, of_distances: torch.Tensor, *, tokens: int, keys: int) -> torch.Tensor:
        """The rows of [heads, distances, head_dim] for a text, as the operator wants its positions.

        Those of all distances are made of constants only, so that a runtime computes them once. `keys` are tokens of
        the memory and the text.
        """
        count = keys if self.record.causal else keys + tokens - 1
        # narrow, where slicing would clamp: a text that is too long must fail.
        return of_distances.narrow(1, self.farthest + 1 - keys, count)


def key_kinds(
    attention_mask: torch.Tensor, memory_mask: torch.Tensor | None, segments: torch.Tensor | None = None
) -> torch.Tensor:
    """The operator's ``key_kind``, [batch, memory + tokens], int32.

    Args:
        attention_mask: [batch, tokens], 0 for padding.
        memory_mask: [batch, memory], 0 for tokens that are not remembered; None for no memory. Remembered tokens are of
            segment 0.
        segments: [batch, tokens], of the text's tokens; None where all are of segment 0.
    """
    kinds = attention_mask.to(torch.int32)
    if segments is not None:
        kinds = kinds * (segments.to(torch.int32) + 1)
    return kinds if memory_mask is None else torch.cat([memory_mask.to(torch.int32), kinds], dim=1)
