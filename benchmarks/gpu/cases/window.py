"""Cases of sliding-window attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.cases.case import Case
from hdplugins import OPERATORS
from hdplugins.kernels.block_config import BlockConfig


@dataclass(frozen=True, kw_only=True)
class WindowCase(Case):
    """Sliding-window attention; `globals` leading tokens are global."""

    OPERATOR = OPERATORS["SlidingWindowAttention"]
    IN_ROWS = ("left", "right", "globals")
    REHEARSED_BLOCK_CONFIG = BlockConfig(64, 32, 4, 2, 32)
    REHEARSED_TOKENS = 32

    left: int
    right: int
    globals: int = 0
    dilation: tuple[int, ...] = (1,)
    global_bound: int | None = None

    @classmethod
    def checked(cls, head_dim: int, dtype: str) -> Iterator[WindowCase]:
        for tokens, left, right, dilation in ((1, 16, 16, (1,)), (333, 100, 90, (1, 1, 3)), (700, 256, 256, (1,))):
            shape = {"batch": 2, "heads": 3, "tokens": tokens, "head_dim": head_dim, "dtype": dtype}
            yield cls(**shape, left=left, right=right, dilation=dilation, global_bound=8)

    @classmethod
    def shipped(cls) -> WindowCase:
        return list(cls.checked(64, "float16"))[1]

    @classmethod
    def timed(cls, window: int, **shape: Any) -> Iterator[tuple[str, WindowCase, str]]:
        near = cls(**shape, left=window, right=window)
        opened = cls(**shape, left=near.tokens, right=near.tokens)
        yield "window", near, "kernel"
        yield "window, 1 global", dataclasses.replace(near, globals=1), "kernel"
        yield "FlexAttention window", near, "flex"
        yield "FlexAttention window, flash", near, "flex flash"
        yield "FlashAttention 4 window", near, "flash 4"
        yield "cuDNN window", near, "cudnn window"
        yield "our candidate in Gluon, window", near, "candidate"
        yield "open window", opened, "kernel"
        yield "our candidate in Gluon, dense", opened, "candidate"
        yield "FlashAttention 4 dense", opened, "flash 4"
        yield "torch SDPA dense, cuDNN", opened, "sdpa cudnn"
        yield "torch SDPA dense, flash", opened, "sdpa flash"

    @property
    def attributes(self) -> dict[str, Any]:
        bound = self.globals if self.global_bound is None else self.global_bound
        window = {"left": self.left, "right": self.right, "dilation": self.dilation}
        return {**window, "global_bound": bound, "scale": self.head_dim**-0.5}

    def masks(self, device: str) -> list[Any]:
        import torch

        token_kind = torch.ones(self.batch, self.tokens, dtype=torch.int32, device=device)
        token_kind[:, : self.globals] = 2
        return [token_kind]

    def make_ragged(self, mask: Any) -> None:
        """Some tokens of the second text are global."""
        mask[0, self.tokens - self.tokens // 4 :] = 0
        mask[1, :: max(1, self.tokens // 4)] = 2

    @property
    def decisive(self) -> dict[str, Any]:
        return {**self.attributes, "global_tokens": self.globals}

    def is_computed_by(self, peer: str) -> bool:
        return True

    def flex_mask(self, device: str) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        def sees(batch: Any, head: Any, query_index: Any, key_index: Any) -> Any:
            near = (key_index - query_index <= self.right) & (query_index - key_index <= self.left)
            return near | (key_index < self.globals) if self.globals else near

        return create_block_mask(sees, None, None, self.tokens, self.tokens, device=device)
