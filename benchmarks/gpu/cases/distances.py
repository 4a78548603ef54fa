"""Cases of attention by clipped distance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.cases.case import Case
from hdplugins import OPERATORS


@dataclass(frozen=True, kw_only=True)
class DistanceCase(Case):
    """Attention by clipped distance: T5's, whose numbers all queries share, or NEZHA's, with values."""

    OPERATOR = OPERATORS["ClippedDistanceAttention"]
    IN_ROWS = ("reach", "is_own")

    reach: int = 64
    is_own: bool = False
    """Each text and query has numbers of its own, and there are values."""

    @classmethod
    def compiled_shapes(cls, head_dim: int) -> list[tuple[int, ...]]:
        return [*[(1, 1, 1, head_dim)] * cls.OPERATOR.states, (1, 1), (1, 1, 1, 3), (3, head_dim)]

    @classmethod
    def checked(cls, head_dim: int, dtype: str) -> Iterator[DistanceCase]:
        for tokens in (1, 200, 1100):
            shape = {"batch": 2, "heads": 3, "tokens": tokens, "head_dim": head_dim, "dtype": dtype}
            yield cls(**shape, reach=128)
            yield cls(**shape, is_own=True)

    @classmethod
    def timed(cls, window: int, **shape: Any) -> Iterator[tuple[str, DistanceCase, str]]:
        shared = cls(**shape, reach=128)
        yield "distances of T5", shared, "kernel"
        yield "FlexAttention distances of T5", shared, "flex"
        yield "definition of T5's distances", shared, "definition"
        # Without a peer: half precision is too coarse for the definition's sums of weights by distance.
        yield "distances of NEZHA", cls(**shape, is_own=True), "kernel"
        yield "torch SDPA dense, cuDNN", shared, "sdpa cudnn"

    @property
    def attributes(self) -> dict[str, Any]:
        return {"reach": self.reach, "scale": self.head_dim**-0.5}

    def masks(self, device: str) -> list[Any]:
        import torch

        key_mask = torch.ones(self.batch, self.tokens, dtype=torch.bool, device=device)
        texts, queries = (self.batch, self.tokens) if self.is_own else (1, 1)
        made, rows = {"device": device, "dtype": getattr(torch, self.dtype)}, 2 * self.reach + 1
        values = torch.randn(rows, self.head_dim, **made) if self.is_own else None
        return [key_mask, torch.randn(texts, queries, self.heads, rows, **made), values]

    def flex_mask(self, device: str) -> Any:
        return None

    def flex_score(self, tensors: Sequence[Any]) -> Any:
        """T5's: NEZHA's values by distance are no scores."""
        reach, numbers = self.reach, tensors[self.OPERATOR.states + 1]  # [1, 1, heads, distances]

        def added(score: Any, batch: Any, head: Any, query_index: Any, key_index: Any) -> Any:
            distance = (key_index - query_index).clamp(-reach, reach)
            return score + numbers[0, 0, head, distance + reach]

        return added
