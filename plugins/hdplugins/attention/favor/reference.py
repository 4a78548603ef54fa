"""The semantics of FAVOR+, in plain PyTorch."""

from __future__ import annotations

import math

import torch

from hdplugins.attention.favor.operator import OPERATOR


def favor_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    projection: torch.Tensor,
    *,
    features: int,
    scale: float,
    epsilon: float,
    compat: int,
) -> torch.Tensor:
    """Attention whose weights are products of positive random features.

    With P the projection and s = sqrt(scale), a vector x has the features

        phi(x) = exp(s P x - |s x|^2 / 2 - highest) + epsilon

    where ``highest`` is the largest of s P x: for a query of its own, for a key of those of all keys of its head. With
    rows of P drawn from a Gaussian, phi(q) . phi(k) is on average exp(scale q . k), but for `epsilon` and a factor that
    all keys share. The result is a mean of the values with these weights:

        result[i] = sum over j of phi(q[i]) . phi(k[j]) value[j] / sum over j of phi(q[i]) . phi(k[j])

    Keys of padding take no part in either sum or in ``highest``. With `compat` they take part in all of them, with 0
    for their values, as in lucidrains' performer-pytorch: results then depend on how much padding there is. All of it
    is computed in float32 at least. A sequence without a single real key has the result 0 by definition.

    Args:
        query: [batch, tokens, heads, head_dim], any float dtype, which is also the shape and dtype of the output.
        key, value: [batch, tokens, heads, head_dim].
        key_mask: [batch, tokens], bool, True for real tokens.
        projection: [features, head_dim], float32, P; of all heads.
        features: number of features of a vector, 1 or more.
        scale: factor of the products of queries and keys, above 0; usually head_dim ** -0.5.
        epsilon: least feature, above 0; usually 1e-4.
        compat: 1 if padding counts as keys whose values are 0, else 0.

    Raises:
        ValueError: an attribute is out of its range, or the projection does not fit.
    """
    OPERATOR.check(features=features, epsilon=epsilon, compat=compat)
    expected = [features, query.shape[3]]
    if list(projection.shape) != expected:
        raise ValueError(f"projection is {list(projection.shape)}; it must be [features, head_dim], {expected}.")
    wide = torch.promote_types(query.dtype, torch.float32)
    real = key_mask[:, None, :, None]
    seen = torch.ones_like(real) if compat else real

    def exponents(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """s P x, [batch, heads, tokens, features], and |s x|^2 / 2, [batch, heads, tokens, 1]."""
        scaled = states.transpose(1, 2).to(wide) * scale**0.5
        return scaled @ projection.to(wide).mT, scaled.square().sum(-1, keepdim=True) / 2

    products, half_squares = exponents(query)
    of_query = (products - half_squares - products.amax(-1, keepdim=True)).exp() + epsilon
    products, half_squares = exponents(key)
    highest = products.masked_fill(~seen, -torch.inf).amax((2, 3), keepdim=True)
    of_key = ((products - half_squares - highest).exp() + epsilon).masked_fill(~seen, 0)
    sums = of_key.mT @ value.transpose(1, 2).to(wide).masked_fill(~real, 0)  # [batch, heads, features, head_dim]
    counts = of_key.sum(2).unsqueeze(-1)  # [batch, heads, features, 1]
    attended = ((of_query @ sums) / (of_query @ counts)).transpose(1, 2)
    return attended.masked_fill(~key_mask.any(1)[:, None, None, None], 0).to(query.dtype)


def draw_projection(seed: int, *, features: int, head_dim: int) -> torch.Tensor:
    """Directions that are orthogonal in blocks of `head_dim`, as long as Gaussian vectors.

    Source: Choromanski et al. 2021, section 2.4 and appendix B.2 ("regularised" lengths aside). The generator is
    separate. Blocks are orthogonalised in float64 and signed such that the result does not depend on the version of
    LAPACK.

    Args:
        seed: seed of the generator, 0 or more.
        features: rows, 1 or more.
        head_dim: size of a head, 1 or more.

    Returns:
        [features, head_dim], float32.
    """
    generator = torch.Generator().manual_seed(seed)

    def gaussian(rows: int) -> torch.Tensor:
        return torch.randn(rows, head_dim, generator=generator, dtype=torch.float64)

    blocks = []
    for _ in range(math.ceil(features / head_dim)):
        directions, triangle = torch.linalg.qr(gaussian(head_dim))
        blocks.append((directions * triangle.diagonal().sign()).mT)
    lengths = gaussian(features).norm(dim=1, keepdim=True)
    return (lengths * torch.cat(blocks)[:features]).float()
