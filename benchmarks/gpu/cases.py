"""Cases of the attention kernels: one description of a call for checks, timings and shipped kernels alike."""

from __future__ import annotations

__all__ = [
    "DTYPES",
    "FAMILIES",
    "HIDDEN_SIZE",
    "BlockCase",
    "Case",
    "ChunkCase",
    "DistanceCase",
    "LshCase",
    "WindowCase",
    "flex_attention_on",
]

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hdplugins import OPERATORS, Operator
from hdplugins.kernels.attention_tiles import Tiles
from hdplugins.operators.lsh_attention.hashing import draw_rotations

DTYPES = ("float16", "bfloat16", "float32")
HIDDEN_SIZE = 1024
"""Of the cases that are timed; they all have the same number of tokens."""

BLOCK_SIZE, RANDOM_BLOCKS = 64, 3
"""BigBird as it is published."""

ETC = {
    "block_size": BLOCK_SIZE, "first_global": 2, "last_global": 0, "window": 1, "first_repeats": 0, "dense_tokens": 0,
    "ends_by_row": 1,
}  # fmt: skip
TABLE = ETC | {"first_global": 1, "last_global": 1, "ends_by_row": 0}
HF_EVAL = TABLE | {"first_repeats": RANDOM_BLOCKS, "dense_tokens": (5 + 2 * RANDOM_BLOCKS) * BLOCK_SIZE}
"""Its random blocks are all block 0, as Hugging Face evaluates them; dense where Hugging Face is, below 705 tokens."""

_MOST_COMPILED_SHAPES = 64

_LEAST_GAP = 1e-3
"""Between the products that decide a hash: beyond the rounding of float32."""


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """One call of an operator on [batch, heads, tokens, head_dim]; a subclass for each operator.

    Attributes:
        OPERATOR: the operator.
        COMPILED: attributes that its kernels are compiled for besides head_dim and dtype, each time other kernels.
        IN_ROWS: what a result says of a case besides its shape.
        REHEARSED_TILES: small ones.
        REHEARSED_TOKENS: of the text that a rehearsal times, short as it is.
    """

    OPERATOR: ClassVar[Operator]
    COMPILED: ClassVar[Sequence[Mapping[str, Any]]]
    IN_ROWS: ClassVar[tuple[str, ...]] = ()
    REHEARSED_TILES: ClassVar[Tiles]
    REHEARSED_TOKENS: ClassVar[int]

    batch: int
    heads: int
    tokens: int
    head_dim: int
    dtype: str

    @classmethod
    def compiled_shapes(cls, head_dim: int) -> list[tuple[int, ...]]:
        """Of the inputs; axes that vary are 1."""
        states = cls.OPERATOR.states
        return [*[(1, 1, 1, head_dim)] * states, (1, 1), *[(1, 1, 1)] * (len(cls.OPERATOR.inputs) - states - 1)]

    @classmethod
    @abstractmethod
    def checked(cls, head_dim: int, dtype: str) -> Iterator[Case]:
        """What must be right before anything is timed, the short texts first."""

    @classmethod
    @abstractmethod
    def shipped(cls) -> Case:
        """What kernels are checked with that were compiled ahead of time."""

    @classmethod
    @abstractmethod
    def timed(cls, window: int, **shape: Any) -> Iterator[tuple[str, Case, str]]:
        """(name, case, who computes it: ``kernel``, ``flex`` or ``sdpa``); `window` is of those that have one."""

    @property
    @abstractmethod
    def attributes(self) -> dict[str, Any]:
        """All of the operator's."""

    @abstractmethod
    def masks(self, device: str, *, is_ragged: bool) -> list[Any]:
        """The inputs after the states; None for an optional one that is left out."""

    @abstractmethod
    def pairs(self) -> int:
        """Queries and keys that see each other in one text without padding, in all heads."""

    @abstractmethod
    def flex_mask(self, device: str) -> Any:
        """The same as a BlockMask of FlexAttention."""

    @property
    def row(self) -> dict[str, Any]:
        """What a result says of the case."""
        shape = [each.name for each in dataclasses.fields(Case)]
        return {name: getattr(self, name) for name in (*shape, *self.IN_ROWS)}

    def tensors(self, device: str, *, is_ragged: bool = False) -> list[Any]:
        """The operator's inputs; the states are random.

        Args:
            device: ``cuda``, or ``cpu`` where Triton interprets.
            is_ragged: some tokens are padding, and some are what else a mask can say.
        """
        import torch

        size, dtype = (self.batch, self.heads, self.tokens, self.head_dim), getattr(torch, self.dtype)
        texts = [torch.randn(size, device=device, dtype=dtype) for _ in range(self.OPERATOR.states)]
        return [*texts, *self.masks(device, is_ragged=is_ragged)]


@dataclass(frozen=True, kw_only=True)
class WindowCase(Case):
    """Sliding-window attention; `globals` leading tokens are global."""

    OPERATOR = OPERATORS["SlidingWindowAttention"]
    COMPILED = ({},)
    IN_ROWS = ("left", "right", "globals")
    REHEARSED_TILES = Tiles(64, 32, 4, 2, 32)
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
        yield "open window", opened, "kernel"
        yield "torch SDPA dense", opened, "sdpa"

    @property
    def attributes(self) -> dict[str, Any]:
        bound = self.globals if self.global_bound is None else self.global_bound
        window = {"left": self.left, "right": self.right, "dilation": self.dilation}
        return {**window, "global_bound": bound, "scale": self.head_dim**-0.5}

    def masks(self, device: str, *, is_ragged: bool) -> list[Any]:
        import torch

        token_kind = torch.ones(self.batch, self.tokens, dtype=torch.int32, device=device)
        token_kind[:, : self.globals] = 2
        if is_ragged:
            token_kind[0, self.tokens - self.tokens // 4 :] = 0
            token_kind[1, :: max(1, self.tokens // 4)] = 2
        return [token_kind]

    def pairs(self) -> int:
        count = self.OPERATOR.face("pairs").pairs
        return count(tokens=self.tokens, heads=self.heads, global_tokens=self.globals, **self.attributes)

    def flex_mask(self, device: str) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        def sees(batch: Any, head: Any, query_index: Any, key_index: Any) -> Any:
            near = (key_index - query_index <= self.right) & (query_index - key_index <= self.left)
            return near | (key_index < self.globals) if self.globals else near

        return create_block_mask(sees, None, None, self.tokens, self.tokens, device=device)


@dataclass(frozen=True, kw_only=True)
class BlockCase(Case):
    """Block-sparse attention; `listed` are the lowest and highest blocks that a random table lists, None for no table.

    FlexAttention gets the same blocks as full ones, without a mask function on a GPU, and is spared that block 0 counts
    several times.
    """

    OPERATOR = OPERATORS["BlockSparseAttention"]
    COMPILED = tuple({"block_size": size} for size in (16, 32, 64, 84, 128))
    REHEARSED_TILES = Tiles(64, 64, 4, 2, 32)
    REHEARSED_TOKENS = 100

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
        yield "torch SDPA dense", cls(**shape, blocks=HF_EVAL | {"dense_tokens": published.tokens}), "sdpa"

    @staticmethod
    def inner_blocks(tokens: int) -> tuple[int, int]:
        """All but the first and the last, and block 1 at least."""
        return 1, max(1, -(-tokens // BLOCK_SIZE) - 2)

    @property
    def attributes(self) -> dict[str, Any]:
        return {**self.blocks, "scale": self.head_dim**-0.5}

    def masks(self, device: str, *, is_ragged: bool) -> list[Any]:
        import torch

        token_mask = torch.ones(self.batch, self.tokens, dtype=torch.int32, device=device)
        if is_ragged:
            token_mask[0, self.tokens - self.tokens // 4 :] = 0
            token_mask[1, 1 :: max(2, self.tokens // 4)] = 0
            token_mask[2:, 90:] = 0
        return [token_mask, self.table(device)]

    def table(self, device: str) -> Any:
        """[heads, blocks - 2, RANDOM_BLOCKS], int32, one row at least; None for none."""
        import torch

        if self.listed is None:
            return None
        blocks = -(-self.tokens // BLOCK_SIZE)
        generator = torch.Generator().manual_seed(blocks)
        size, (lowest, highest) = (self.heads, max(1, blocks - 2), RANDOM_BLOCKS), self.listed
        return torch.randint(lowest, highest + 1, size, generator=generator).int().to(device)

    def pairs(self) -> int:
        table = self.table("cpu")
        listed = None if table is None else table.numpy()
        count = self.OPERATOR.face("pairs").pairs
        return count(tokens=self.tokens, heads=self.heads, **self.attributes, listed_blocks=listed)

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


@dataclass(frozen=True, kw_only=True)
class ChunkCase(Case):
    """Chunk attention to the chunk before and the own one, as Reformer has it."""

    OPERATOR = OPERATORS["ChunkAttention"]
    COMPILED = tuple({"chunk": size} for size in (16, 32, 64))
    IN_ROWS = ("chunk", "causal")
    REHEARSED_TILES = Tiles(64, 64, 4, 2, 32)
    REHEARSED_TOKENS = 100

    chunk: int = 64
    causal: int = 0

    @classmethod
    def checked(cls, head_dim: int, dtype: str) -> Iterator[ChunkCase]:
        for tokens in (1, 200, 1100):
            shape = {"batch": 2, "heads": 3, "tokens": tokens, "head_dim": head_dim, "dtype": dtype}
            yield cls(**shape)
            yield cls(**shape, chunk=40, causal=1)

    @classmethod
    def shipped(cls) -> ChunkCase:
        return list(cls.checked(64, "float16"))[-1]

    @classmethod
    def timed(cls, window: int, **shape: Any) -> Iterator[tuple[str, ChunkCase, str]]:
        chunks = cls(**shape)
        yield "chunks", chunks, "kernel"
        yield "chunks, causal", dataclasses.replace(chunks, causal=1), "kernel"
        yield "FlexAttention chunks", chunks, "flex"
        yield "torch SDPA dense", chunks, "sdpa"

    @property
    def attributes(self) -> dict[str, Any]:
        seen = {"chunk": self.chunk, "before": 1, "after": 0, "multiple": self.chunk, "causal": self.causal}
        return {**seen, "scale": self.head_dim**-0.5}

    def masks(self, device: str, *, is_ragged: bool) -> list[Any]:
        import torch

        token_mask = torch.ones(self.batch, self.tokens, dtype=torch.int32, device=device)
        if is_ragged:
            token_mask[0, self.tokens - self.tokens // 4 :] = 0
            token_mask[1, 1 :: max(2, self.tokens // 4)] = 0
        return [token_mask]

    def pairs(self) -> int:
        count = self.OPERATOR.face("pairs").pairs
        return int(count(tokens=self.tokens, heads=self.heads, **self.attributes))

    def flex_mask(self, device: str) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        chunk, chunks = self.chunk, -(-self.tokens // self.chunk)

        def sees(batch: Any, head: Any, query_index: Any, key_index: Any) -> Any:
            steps = (query_index // chunk - key_index // chunk) % chunks
            return steps <= 1

        return create_block_mask(sees, None, None, self.tokens, self.tokens, device=device)


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
        yield "torch SDPA dense", hashed, "sdpa"

    @property
    def attributes(self) -> dict[str, Any]:
        buckets = (2 * -(-self.tokens // self.chunk),)
        # Two modes at once: where one is checked, so is the other.
        return {**super().attributes, "buckets": buckets, "rounds": self.rounds, "ends_by_row": self.causal}

    def masks(self, device: str, *, is_ragged: bool) -> list[Any]:
        rotations = draw_rotations(
            0, heads=self.heads, head_dim=self.head_dim, buckets=self.attributes["buckets"], rounds=self.rounds
        )
        return [*super().masks(device, is_ragged=is_ragged), rotations.to(device)]

    def tensors(self, device: str, *, is_ragged: bool = False) -> list[Any]:
        """Their hashes are decided: tokens with two directions that are nearly as far are drawn again."""
        import torch

        query_key, *others = super().tensors(device, is_ragged=is_ragged)
        rotations = others[-1].double()
        while True:
            products = torch.einsum("bhtd,hdrn->bhtrn", query_key.double(), rotations)
            top = torch.cat([products, -products], dim=-1).topk(2).values
            close = ((top[..., 0] - top[..., 1]).amin(-1) < _LEAST_GAP)[..., None]
            if not close.any():
                return [query_key, *others]
            query_key = torch.where(close, torch.randn_like(query_key), query_key)

    def flex_mask(self, device: str) -> Any:
        raise NotImplementedError("hashes decide which tokens see each other")


@dataclass(frozen=True, kw_only=True)
class DistanceCase(Case):
    """Attention by clipped distance: T5's, whose numbers all queries share, or NEZHA's, with values."""

    OPERATOR = OPERATORS["ClippedDistanceAttention"]
    COMPILED = ({},)
    IN_ROWS = ("reach", "is_own")
    REHEARSED_TILES = Tiles(64, 64, 4, 2, 32)
    REHEARSED_TOKENS = 100

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
    def shipped(cls) -> DistanceCase:
        return list(cls.checked(64, "float16"))[-1]

    @classmethod
    def timed(cls, window: int, **shape: Any) -> Iterator[tuple[str, DistanceCase, str]]:
        shared = cls(**shape, reach=128)
        yield "distances of T5", shared, "kernel"
        yield "distances of NEZHA", cls(**shape, is_own=True), "kernel"
        yield "torch SDPA dense", shared, "sdpa"

    @property
    def attributes(self) -> dict[str, Any]:
        return {"reach": self.reach, "scale": self.head_dim**-0.5}

    def masks(self, device: str, *, is_ragged: bool) -> list[Any]:
        import torch

        key_mask = torch.ones(self.batch, self.tokens, dtype=torch.bool, device=device)
        if is_ragged:
            key_mask[0, self.tokens - self.tokens // 4 :] = False
            key_mask[1, 1 :: max(2, self.tokens // 4)] = False
        texts, queries = (self.batch, self.tokens) if self.is_own else (1, 1)
        made, rows = {"device": device, "dtype": getattr(torch, self.dtype)}, 2 * self.reach + 1
        values = torch.randn(rows, self.head_dim, **made) if self.is_own else None
        return [key_mask, torch.randn(texts, self.heads, queries, rows, **made), values]

    def pairs(self) -> int:
        return self.OPERATOR.face("pairs").pairs(tokens=self.tokens, heads=self.heads, **self.attributes)

    def flex_mask(self, device: str) -> Any:
        raise NotImplementedError("terms of scores are no mask")


FAMILIES: dict[str, type[Case]] = {
    "window": WindowCase, "blocks": BlockCase, "chunks": ChunkCase, "lsh": LshCase, "distances": DistanceCase,
}  # fmt: skip


def flex_attention_on(device: str) -> Any:
    """PyTorch's `flex_attention`, compiled for every shape: from the ninth on PyTorch would run it uncompiled.

    A rehearsal does without the compiler, which takes half a minute a shape there.
    """
    import torch._dynamo
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = _MOST_COMPILED_SHAPES
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention
