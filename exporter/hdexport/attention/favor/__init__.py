"""FAVOR+, attention of random features: a Performer's own, or in place of dense attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hdexport.attention.attention_type import DENSE_BASELINE, AttentionRecord
from hdruntime.bundle.checked_json import Count, Length
from hdruntime.bundle.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class FavorAttention(AttentionRecord):
    """Layers whose weights are products of positive random features.

    Attributes:
        layers: how many.
        features: number of features of a query or key.
        seed: seed of the features' directions, one for all layers; None where the checkpoint has them, for each layer.
        epsilon: least feature.
        compat: whether padding counts as keys whose values are 0; then it changes answers.
    """

    holds_scores: ClassVar = False
    type: Literal["favor"] = "favor"
    layers: Length
    features: Length
    seed: Count | None
    epsilon: float
    compat: bool = False

    @property
    def converted(self) -> bool:
        """Whether the kind took the place of dense attention."""
        return self.seed is not None

    def keys_of_layers(self, manifest: Manifest, tokens: int) -> list[int]:
        """As many keys as a query and a key have features."""
        return [min(tokens, 2 * self.features)] * self.layers

    @property
    def baseline_note(self) -> str | None:
        """PyTorch's model is dense where features took that place."""
        return DENSE_BASELINE.format("random features") if self.converted else None
