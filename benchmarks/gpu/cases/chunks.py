"""Cases of chunk attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.cases.case import Case
from hdplugins import OPERATORS


@dataclass(frozen=True, kw_only=True)
class ChunkCase(Case):
    """Chunk attention to the chunk before and the own one, as Reformer has it."""

    OPERATOR = OPERATORS["ChunkAttention"]
    COMPILED = tuple({"chunk": size} for size in (16, 32, 64))
    IN_ROWS = ("chunk", "causal")

    chunk: int = 64
    causal: int = 0

    @classmethod
    def checked(cls, head_dim: int, dtype: str) -> Iterator[ChunkCase]:
        for tokens in (1, 200, 1100):
            shape = {"batch": 2, "heads": 3, "tokens": tokens, "head_dim": head_dim, "dtype": dtype}
            yield cls(**shape)
            yield cls(**shape, chunk=40, causal=1)

    @classmethod
    def timed(cls, window: int, **shape: Any) -> Iterator[tuple[str, ChunkCase, str]]:
        chunks = cls(**shape)
        yield "chunks", chunks, "kernel"
        yield "chunks, causal", dataclasses.replace(chunks, causal=1), "kernel"
        yield "FlexAttention chunks", chunks, "flex"
        yield "torch SDPA dense, cuDNN", chunks, "sdpa cudnn"

    @property
    def attributes(self) -> dict[str, Any]:
        seen = {"chunk": self.chunk, "before": 1, "after": 0, "multiple": self.chunk, "causal": self.causal}
        return {**seen, "scale": self.head_dim**-0.5}

    def masks(self, device: str) -> list[Any]:
        import torch

        token_mask = torch.ones(self.batch, self.tokens, dtype=torch.int32, device=device)
        return [token_mask]

    def flex_mask(self, device: str) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        chunk, chunks = self.chunk, -(-self.tokens // self.chunk)

        def sees(batch: Any, head: Any, query_index: Any, key_index: Any) -> Any:
            steps = (query_index // chunk - key_index // chunk) % chunks
            return steps <= 1

        return create_block_mask(sees, None, None, self.tokens, self.tokens, device=device)
