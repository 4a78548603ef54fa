"""FAVOR+ in a model."""

from __future__ import annotations

__all__ = ["FavorSetup"]

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hdexport.attention.favor.record import FavorAttention
from hdexport.attention.kind import Setup
from hdexport.model.family import Family

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from hdexport.attention.query_scale import LogScale


@dataclass(frozen=True, kw_only=True)
class FavorSetup(Setup):
    """FAVOR+ in a model.

    Attributes:
        record: the manifest's record of it.
        query_scale: factor of the queries; None for none.
    """

    record: FavorAttention
    query_scale: LogScale | None = None

    def projection(self, model: PreTrainedModel) -> torch.Tensor:
        """[features, head_dim], float32, one for all layers, of a model that was converted."""
        from hdplugins.attention.favor.features import draw_projection

        assert self.record.seed is not None
        config = model.config
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        return draw_projection(self.record.seed, features=self.record.features, head_dim=head_dim)

    def adapt(self, model: PreTrainedModel, family: Family) -> None:
        """The family's own, or features around the layers."""
        if self.is_own:
            assert family.own is not None
            family.own.adapt(model, self)
            return
        from hdexport.attention.favor.node import FavorMask
        from hdexport.attention.model_parts import Layers, wrap_layers

        # A buffer, so that it is an initializer of the graph, and after the model was cast: it stays in float32.
        model.register_buffer("favor_projection", self.projection(model), persistent=False)
        record, query_scale = self.record, self.query_scale

        def around(states: torch.Tensor, mask: torch.Tensor, layers: Layers) -> torch.Tensor:
            factors = None if query_scale is None else query_scale.for_mask(mask)
            return layers(states, FavorMask(record, mask, model.get_buffer("favor_projection"), factors))

        wrap_layers(model, around)
