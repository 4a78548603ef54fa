"""Cases of LSH attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.cases.chunks import ChunkCase
from hdplugins import OPERATORS
from hdplugins.attention.lsh.reference import draw_rotations

_LEAST_GAP = 1e-3
"""Between the products that decide a hash: beyond the rounding of float32."""


@dataclass(frozen=True, kw_only=True)
class LshCase(ChunkCase):
    """LSH attention; a bucket has half a chunk of tokens on average, as Reformer has it."""

    OPERATOR = OPERATORS["LSHAttention"]
    IN_ROWS = ("chunk", "causal", "rounds")

    rounds: int = 4

    @classmethod
    def timed(cls, window: int, **shape: Any) -> Iterator[tuple[str, ChunkCase, str]]:
        hashed = cls(**shape)
        yield "LSH, 1 round", dataclasses.replace(hashed, rounds=1), "kernel"
        yield "LSH", hashed, "kernel"
        yield "torch SDPA dense, cuDNN", hashed, "sdpa cudnn"

    @property
    def attributes(self) -> dict[str, Any]:
        buckets = (2 * -(-self.tokens // self.chunk),)
        # Two modes at once: where one is checked, so is the other.
        return {**super().attributes, "buckets": buckets, "rounds": self.rounds, "ends_by_row": self.causal}

    def masks(self, device: str) -> list[Any]:
        rotations = draw_rotations(
            0, heads=self.heads, head_dim=self.head_dim, buckets=self.attributes["buckets"], rounds=self.rounds
        )
        return [*super().masks(device), rotations.to(device)]

    def tensors(self, device: str, *, is_ragged: bool = False) -> list[Any]:
        """Their hashes are decided: tokens with two directions that are nearly as far are drawn again."""
        import torch

        query_key, *others = super().tensors(device, is_ragged=is_ragged)
        rotations = others[-1].double()
        while True:
            products = torch.einsum("bthd,hdrn->bthrn", query_key.double(), rotations)
            top = torch.cat([products, -products], dim=-1).topk(2).values
            close = ((top[..., 0] - top[..., 1]).amin(-1) < _LEAST_GAP)[..., None]
            if not close.any():
                return [query_key, *others]
            query_key = torch.where(close, torch.randn_like(query_key), query_key)

    def flex_mask(self, device: str) -> Any:
        raise NotImplementedError("hashes decide which tokens see each other")
