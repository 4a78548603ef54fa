"""FAVOR+ in words: the request, and the record in a manifest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hdruntime.bundle.value_types import Count, Length


@dataclass(frozen=True, kw_only=True)
class FavorAttention:
    """Layers whose weights are products of positive random features.

    Attributes:
        layers: how many.
        features: of a query or key.
        seed: of the features' directions, one for all layers; None where the checkpoint has them, for each layer.
        epsilon: least feature.
        compat: whether padding counts as keys whose values are 0; then it changes answers.
    """

    kind: Literal["favor"] = "favor"
    layers: Length
    features: Length
    seed: Count | None
    epsilon: float
    compat: bool = False

    @property
    def converted(self) -> bool:
        """Whether the kind took the place of dense attention."""
        return self.seed is not None


@dataclass(frozen=True, kw_only=True)
class FavorRequest:
    """FAVOR+ as requested; None for a field that was not given.

    Attributes:
        features: of a query or key.
        seed: of their directions.
        compat: whether padding counts as keys whose values are 0.
    """

    features: int | None = None
    seed: int | None = None
    compat: bool = False
