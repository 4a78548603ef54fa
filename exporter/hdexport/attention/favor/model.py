"""FAVOR+ in PyTorch: the operator's node in a traced model, the mask that converted layers share, and the reference.

The reference that bundles are compared with is the attention in plain PyTorch, text by text, in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hdexport.attention.favor import FavorAttention
from hdexport.attention.model_parts import operator_node, run_text, use_attention
from hdexport.attention.query_scale import scaled


def favor_node(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    projection: torch.Tensor,
    *,
    record: FavorAttention,
    scale: float,
) -> torch.Tensor:
    """One ``FavorAttention`` node; see `operator_node`.

    Args:
        query, key, value: [batch, tokens, heads, head_dim]; the result has the same shape and dtype.
        key_mask: [batch, tokens], bool, True for real tokens.
        projection: [features, head_dim], float32.
    """
    attributes = {
        "features": projection.shape[0],
        "scale": float(scale),
        "epsilon": record.epsilon,
        "compat": int(record.compat),
    }
    return operator_node("FavorAttention", (query, key, value, key_mask, projection), attributes)


@dataclass(frozen=True)
class FavorMask:
    """The mask of layers whose dense attention became FAVOR+.

    Attributes:
        key_mask: [batch, tokens], bool, True for real tokens.
        projection: [features, head_dim], float32.
        query_scale: [batch, 1, 1, 1], float32, factors of the queries; None for none.
    """

    record: FavorAttention
    key_mask: torch.Tensor
    projection: torch.Tensor
    query_scale: torch.Tensor | None = None

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[batch, tokens, heads, head_dim]; see `hdexport.attention.interface.LayerMask`."""
        query = scaled(query, self.query_scale)
        attended = favor_node(query, key, value, self.key_mask, self.projection, record=self.record, scale=scale)
        return attended.contiguous()


_NUMBERS = itertools.count()
"""Numbers of the models that attend so, in this process."""


def use_features(model: PreTrainedModel, projection: torch.Tensor, record: FavorAttention) -> FeatureAttention:
    """Put FAVOR+ in the place of a model's dense attention, in place; all layers call the attention that is returned.

    `projection` is [features, head_dim], float32.
    """
    attention = FeatureAttention(projection, record)
    # A registered function is for all models of the process: each has one of its own.
    name = f"hdexport-favor-reference-{next(_NUMBERS)}"
    use_attention(model, name, attention, lambda *_, attention_mask, **__: attention_mask.bool()[:, None, None])
    return attention


class FeatureAttention:
    """An attention function, whose mask is [batch, 1, 1, tokens].

    Attributes:
        projection: [features, head_dim].
        errors: errors of the calls that are compared with softmax attention, [] each; None while no call is compared.
    """

    def __init__(self, projection: torch.Tensor, record: FavorAttention) -> None:
        self.projection, self.record = projection, record
        self.errors: list[torch.Tensor] | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """[batch, tokens, heads, head_dim], and no weights."""
        attended = attend_by_features(
            query,
            key,
            value,
            attention_mask[:, 0, 0],
            self.projection,
            epsilon=self.record.epsilon,
            compat=self.record.compat,
            scaling=scaling,
        )
        if self.errors is not None:
            exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling)
            self.errors.append((attended - exact).norm() / exact.norm())
        return attended.transpose(1, 2).contiguous(), None

    def estimate_error(self, model: PreTrainedModel, input_ids: torch.Tensor) -> Iterator[str]:
        """A line on the relative error of all layers' attention for a text, [1, tokens], each on the output of those
        before it.

        The error is the length of the difference to softmax attention of the same queries, keys and values, divided by
        that one's length, over all heads and tokens of the text.
        """
        errors: list[torch.Tensor] = []
        self.errors = errors
        try:
            run_text(model, input_ids)
        finally:
            self.errors = None
        by_layer = torch.stack(errors)
        yield (
            f"FAVOR+ with {self.record.features} features is off softmax attention by {by_layer.mean():.0%} of its "
            f"length; by layer {by_layer.min():.0%} to {by_layer.max():.0%}"
        )


def attend_by_features(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    projection: torch.Tensor,
    *,
    epsilon: float,
    compat: bool,
    scaling: float | None = None,
) -> torch.Tensor:
    """Attend in each text to its real keys; with `compat` to all, with 0 for the values of padding.

    Args:
        query, key, value: [batch, heads, tokens, head_dim]; the result has the same shape and dtype.
        mask: [batch, tokens], True or nonzero for real tokens.
        projection: [features, head_dim].
        epsilon: least feature.
        scaling: factor of the products of queries and keys; None for head_dim ** -0.5.
    """
    directions, attended = projection.double().mT, torch.zeros_like(query)
    # Half of the factor for each of two vectors that are multiplied.
    half = (query.shape[-1] ** -0.5 if scaling is None else scaling) ** 0.5
    for row, real in enumerate(mask.bool()):
        seen = torch.ones_like(real) if compat else real
        if not seen.any():
            continue
        values = value[row].double().masked_fill(~real[:, None], 0)[:, seen]
        queries, keys = query[row].double() * half, key[row][:, seen].double() * half
        by_query, by_key = queries @ directions, keys @ directions  # [heads, tokens, features]
        of_query = _features(by_query, queries, by_query.amax(-1, keepdim=True), epsilon)
        of_key = _features(by_key, keys, by_key.flatten(1).amax(-1)[:, None, None], epsilon)
        numerators = of_query @ (of_key.mT @ values)
        denominators = of_query @ of_key.sum(1)[..., None]
        attended[row] = (numerators / denominators).to(attended.dtype)
    return attended


def _features(products: torch.Tensor, vectors: torch.Tensor, highest: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.exp(products - vectors.pow(2).sum(-1, keepdim=True) / 2 - highest) + epsilon
