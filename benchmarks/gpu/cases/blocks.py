"""Cases of block-sparse attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.cases.case import Case
from hdplugins import OPERATORS

BLOCK_SIZE, RANDOM_BLOCKS = 64, 3
"""BigBird as it is published."""

ETC = {
    "block_size": BLOCK_SIZE, "first_global": 2, "last_global": 0, "window": 1, "first_repeats": 0, "dense_tokens": 0,
    "ends_by_row": 1,
}  # fmt: skip
TABLE = ETC | {"first_global": 1, "last_global": 1, "ends_by_row": 0}
HF_EVAL = TABLE | {"first_repeats": RANDOM_BLOCKS, "dense_tokens": (5 + 2 * RANDOM_BLOCKS) * BLOCK_SIZE}
"""Its random blocks are all block 0, as Hugging Face evaluates them; dense where Hugging Face is, below 705 tokens."""


@dataclass(frozen=True, kw_only=True)
class BlockCase(Case):
    """Block-sparse attention; `listed` are the lowest and highest blocks that a random table lists, None for no table.

    FlexAttention gets the same blocks as full ones, without a mask function on a GPU, and is spared that block 0 counts
    several times.
    """

    OPERATOR = OPERATORS["BlockSparseAttention"]
    COMPILED = tuple({"block_size": size} for size in (16, 32, 64, 84, 128))

    blocks: Mapping[str, int] = field(default_factory=lambda: HF_EVAL)
    listed: tuple[int, int] | None = None

    @classmethod
    def checked(cls, head_dim: int, dtype: str) -> Iterator[BlockCase]:
        for tokens in (1, 200, 1100):
            shape = {"batch": 2, "heads": 3, "tokens": tokens, "head_dim": head_dim, "dtype": dtype}
            listed = cls.inner_blocks(tokens) if tokens > 2 * BLOCK_SIZE else None
            yield cls(**shape, blocks=HF_EVAL | {"dense_tokens": 70})
            yield cls(**shape, blocks=TABLE, listed=listed)
            yield cls(**shape, blocks=ETC)

    @classmethod
    def shipped(cls) -> BlockCase:
        """The table has places that list nothing, and blocks after the end of the text."""
        blocks = TABLE | {"first_repeats": 2, "dense_tokens": 100, "ends_by_row": 1}
        return cls(batch=3, heads=3, tokens=1100, head_dim=64, dtype="float16", blocks=blocks, listed=(-1, 19))

    @classmethod
    def timed(cls, window: int, **shape: Any) -> Iterator[tuple[str, BlockCase, str]]:
        published = cls(**shape)
        with_table = cls(**shape, blocks=TABLE, listed=cls.inner_blocks(published.tokens))
        for suffix, case in (("", published), (", table", with_table)):
            yield f"bigbird{suffix}", case, "kernel"
            yield f"FlexAttention bigbird{suffix}", case, "flex"
        yield "torch SDPA dense, cuDNN", cls(**shape, blocks=HF_EVAL | {"dense_tokens": published.tokens}), "sdpa cudnn"

    @staticmethod
    def inner_blocks(tokens: int) -> tuple[int, int]:
        """All but the first and the last, and block 1 at least."""
        return 1, max(1, -(-tokens // BLOCK_SIZE) - 2)

    @property
    def attributes(self) -> dict[str, Any]:
        return {**self.blocks, "scale": self.head_dim**-0.5}

    def masks(self, device: str) -> list[Any]:
        import torch

        token_mask = torch.ones(self.batch, self.tokens, dtype=torch.int32, device=device)
        return [token_mask, self.table(device)]

    def make_ragged(self, mask: Any) -> None:
        super().make_ragged(mask)
        mask[2:, 90:] = 0

    def table(self, device: str) -> Any:
        """[heads, blocks - 2, RANDOM_BLOCKS], int32, one row at least; None for none."""
        import torch

        if self.listed is None:
            return None
        blocks = -(-self.tokens // BLOCK_SIZE)
        generator = torch.Generator().manual_seed(blocks)
        size, (lowest, highest) = (self.heads, max(1, blocks - 2), RANDOM_BLOCKS), self.listed
        return torch.randint(lowest, highest + 1, size, generator=generator).int().to(device)

    @property
    def decisive(self) -> dict[str, Any]:
        return {**self.attributes, "listed_blocks": self.table("cpu")}

    def seen_blocks(self, device: str) -> Any:
        """[1 or heads, blocks, blocks], bool: which blocks of keys each block of queries sees."""
        import torch

        table, first = self.table(device), self.blocks["first_global"]
        blocks = -(-self.tokens // BLOCK_SIZE)
        block = torch.arange(blocks, device=device)
        is_global = (block < first) | ((block == blocks - 1) & bool(self.blocks["last_global"]))
        near = (block[:, None] - block).abs() <= self.blocks["window"]
        is_dense = self.tokens <= self.blocks["dense_tokens"]
        seen = (near | is_global | is_global[:, None] | is_dense)[None]
        if table is None:
            return seen
        seen = seen.expand(self.heads, -1, -1).clone()
        rows = min(table.shape[1], blocks - first)
        listed = torch.zeros(self.heads, rows, blocks, dtype=torch.bool, device=device)
        seen[:, first : first + rows] |= listed.scatter_(2, table[:, :rows].long(), True)
        return seen

    def is_computed_by(self, peer: str) -> bool:
        return False  # a block may count several times

    def flex_mask(self, device: str) -> Any:
        import torch
        from torch.nn.attention.flex_attention import BlockMask

        seen = self.seen_blocks(device)

        def sees(batch: Any, head: Any, query_index: Any, key_index: Any) -> Any:
            return seen[head % seen.shape[0], query_index // BLOCK_SIZE, key_index // BLOCK_SIZE]

        count = seen.sum(-1, dtype=torch.int32)[None]
        order = seen.int().argsort(dim=-1, descending=True, stable=True)[None].int()
        # No block is partial, so that a compiled kernel asks the function about none.
        return BlockMask.from_kv_blocks(
            torch.zeros_like(count), torch.zeros_like(order), count, order,
            BLOCK_SIZE=BLOCK_SIZE, mask_mod=sees, seq_lengths=(self.tokens, self.tokens),
        )  # fmt: skip
