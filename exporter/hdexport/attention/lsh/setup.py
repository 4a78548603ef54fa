"""LSH attention in a model."""

from __future__ import annotations

__all__ = ["LshSetup"]

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hdexport.attention.kind import Setup
from hdexport.attention.lsh.record import LshAttention
from hdexport.model.family import Family
from hdruntime.bundle.manifest import Dtype

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class LshSetup(Setup):
    """LSH attention in a model.

    Attributes:
        record: the manifest's record of it.
        dtype: of the bundle.
    """

    record: LshAttention
    dtype: Dtype = "float32"

    def rotations(self, model: PreTrainedModel) -> torch.Tensor | None:
        """[heads, head_dim, rounds, directions], float32, one for all layers; None without hashes."""
        from hdplugins.attention.lsh.hashing import draw_rotations

        hashes, config = self.record.hashes, model.config
        if hashes is None:
            return None
        heads = int(config.num_attention_heads)
        head_dim = int(getattr(config, "attention_head_size", config.hidden_size // heads))
        return draw_rotations(hashes.seed, heads=heads, head_dim=head_dim, buckets=hashes.buckets, rounds=hashes.rounds)

    def adapt(self, model: PreTrainedModel, family: Family) -> None:
        """The family's own, or hashes around the layers."""
        if self.is_own:
            assert family.own is not None
            family.own.adapt(model, self)
            return
        from hdexport.attention.lsh.node import LshMask
        from hdexport.attention.model_parts import wrap_layers

        # A buffer, so that it is an initializer of the graph, and after the model was cast: it stays in float32.
        model.register_buffer("lsh_rotations", self.rotations(model), persistent=False)
        record = self.record
        wrap_layers(
            model,
            lambda states, mask, layers: layers(states, LshMask(record, mask.int(), model.get_buffer("lsh_rotations"))),
        )
