"""Cases of relative attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.cases.case import Case
from hdplugins import OPERATORS
from hdplugins.kernels.block_config import BlockConfig


@dataclass(frozen=True, kw_only=True)
class RelativeCase(Case):
    """Relative attention without a memory, as XLNet has it: with segments in both directions, or causal."""

    OPERATOR = OPERATORS["RelativeAttention"]
    IN_ROWS = ("causal", "reach", "segments")
    REHEARSED_BLOCK_CONFIG = BlockConfig(32, 32, 4, 2, 32)

    causal: int = 0
    reach: int = 0
    segments: bool = True

    @classmethod
    def compiled_shapes(cls, head_dim: int) -> list[tuple[int, ...]]:
        return [*[(1, 1, 1, head_dim)] * cls.OPERATOR.states, (1, 1), (1, 1, head_dim), *[(1, head_dim)] * 2, (1, 1, 1)]

    @classmethod
    def checked(cls, head_dim: int, dtype: str) -> Iterator[RelativeCase]:
        for tokens in (1, 200, 1100):
            shape = {"batch": 2, "heads": 3, "tokens": tokens, "head_dim": head_dim, "dtype": dtype}
            yield cls(**shape)
            yield cls(**shape, causal=1, reach=150, segments=False)

    @classmethod
    def shipped(cls) -> RelativeCase:
        return list(cls.checked(64, "float16"))[-2]

    @classmethod
    def timed(cls, window: int, **shape: Any) -> Iterator[tuple[str, RelativeCase, str]]:
        both = cls(**shape)
        yield "relative of XLNet", both, "kernel"
        yield "definition of XLNet's", both, "definition"
        yield "relative, causal", cls(**shape, causal=1, segments=False), "kernel"
        yield "torch SDPA dense, cuDNN", both, "sdpa cudnn"

    @property
    def attributes(self) -> dict[str, Any]:
        return {"causal": self.causal, "reach": self.reach, "scale": self.head_dim**-0.5}

    def masks(self, device: str) -> list[Any]:
        import torch

        key_kind = torch.ones(self.batch, self.tokens, dtype=torch.int32, device=device)
        if self.segments:
            key_kind[:, self.tokens // 2 :] = 2
        made = {"device": device, "dtype": getattr(torch, self.dtype)}
        distances = self.tokens if self.causal else 2 * self.tokens - 1
        positions = torch.randn(self.heads, distances, self.head_dim, **made)
        biases = [torch.randn(self.heads, self.head_dim, **made) for _ in range(2)]
        scores = torch.randn(self.batch, self.tokens, self.heads, **made) if self.segments else None
        return [key_kind, positions, *biases, scores]
