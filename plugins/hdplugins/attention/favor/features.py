"""The directions of FAVOR+'s random features, and the attributes that define an attention of them.

Attributes are checked without PyTorch, which a machine that only runs a bundle does without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def check_attributes(*, features: int, epsilon: float, compat: int) -> None:
    """Refuse attributes that define nothing.

    Raises:
        ValueError: it says what fits.
    """
    if features < 1:
        raise ValueError(f"features is {features}; it must be 1 or more.")
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon is {epsilon}; it must be above 0, e.g. 0.0001.")
    if compat not in (0, 1):
        raise ValueError(f"compat is {compat}; it must be 0 or 1.")


def check_projection(projection: Sequence[int], *, features: int, head_dim: int) -> None:
    """Refuse a projection of another shape.

    Args:
        projection: its shape.
        features: of the attention.
        head_dim: size of a head.

    Raises:
        ValueError: it says what fits.
    """
    if list(projection) != [features, head_dim]:
        raise ValueError(f"projection is {list(projection)}; it must be [features, head_dim], {[features, head_dim]}.")


def draw_projection(seed: int, *, features: int, head_dim: int) -> torch.Tensor:
    """Directions that are orthogonal in blocks of `head_dim`, as long as Gaussian vectors.

    Source: Choromanski et al. 2021, section 2.4 and appendix B.2 ("regularised" lengths aside). The generator is one
    of its own. Blocks are orthogonalised in float64 and signed such that the result does not depend on the library
    that does it.

    Args:
        seed: of the generator, 0 or more.
        features: rows, 1 or more.
        head_dim: size of a head, 1 or more.

    Returns:
        [features, head_dim], float32.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)

    def gaussian(rows: int) -> torch.Tensor:
        return torch.randn(rows, head_dim, generator=generator, dtype=torch.float64)

    blocks = []
    for _ in range(math.ceil(features / head_dim)):
        directions, triangle = torch.linalg.qr(gaussian(head_dim))
        blocks.append((directions * triangle.diagonal().sign()).mT)
    lengths = gaussian(features).norm(dim=1, keepdim=True)
    return (lengths * torch.cat(blocks)[:features]).float()
