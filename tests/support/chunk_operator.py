"""Chunk attention as tests need it: nodes, their keys in view counted by hand, and its particular cases."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hdplugins import OPERATORS
from hdplugins.attention.operator import BlockOrder
from support.sparse_operators import Description, SparseLayer, scans, token_kinds


@dataclass(frozen=True, kw_only=True)
class Chunks(SparseLayer):
    """A node ChunkAttention; `multiple` is in chunks."""

    operator = OPERATORS["ChunkAttention"]
    chunk: int = 8
    before: int = 1
    after: int = 0
    multiple: int = 1
    causal: int = 0

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            "chunk": self.chunk,
            "before": self.before,
            "after": self.after,
            "multiple": self.multiple * self.chunk,
            "causal": self.causal,
        }

    @property
    def lengths(self) -> list[int]:
        """A chunk, two and the multiple, one less and one more."""
        edges = {self.chunk, 2 * self.chunk, self.multiple * self.chunk}
        return sorted({1, 113, *(edge + shift for edge in edges for shift in (-1, 0, 1))} - {0})

    def chunks_by_hand(self, own: int, chunks: int) -> list[int]:
        """The chunks that one of a circle sees; `chunks` is their number."""
        return [(own + (step if abs(step) < chunks else 0)) % chunks for step in range(-self.before, self.after + 1)]

    def padded(self, tokens: int) -> int:
        """The tokens of a text with the padding that makes whole chunks of it."""
        whole = self.multiple * self.chunk
        return whole * math.ceil(max(tokens, 1) / whole)

    def keys_by_hand(self, kinds: np.ndarray, vectors: np.ndarray, head: int, query: int) -> list[int]:
        size = self.chunk
        seen = self.chunks_by_hand(query // size, self.padded(len(kinds)) // size)
        keys = [size * chunk + place for chunk in seen for place in range(size)]
        return [key for key in keys if key < len(kinds) and kinds[key] and (key <= query or not self.causal)]


_CHUNKS = (
    Chunks(),
    Chunks(dtype="float16", multiple=2),
    Chunks(before=0, after=0, heads=1),
    Chunks(before=1, after=1, head_dim=80),
    Chunks(before=0, after=2, causal=1),
    Chunks(before=2, causal=1, dtype="float16"),
    Chunks(chunk=1, before=3, after=3, multiple=7),
    Chunks(chunk=5, before=3, multiple=3, heads=3),
    Chunks(chunk=64, head_dim=64),
)

_WIDE_CHUNKS = Chunks(chunk=64, heads=4, head_dim=64)

CHUNKS = Description(
    layers=_CHUNKS,
    by_hand=[
        (layer, token_kinds(padding, tokens, batch=2))
        for layer in (_CHUNKS[1], *_CHUNKS[3:8])
        for padding, tokens in (("right", 29), ("holes", 13), ("none", 5))
    ],
    dense=(_CHUNKS[0], 8),
    undefined=[
        (_CHUNKS[0], {"chunk": 0}, "chunk is 0; it must be 1 or more"),
        (_CHUNKS[0], {"before": -1}, "before is -1; it must be 0 or more"),
        (_CHUNKS[0], {"after": -2}, "after is -2; it must be 0 or more"),
        (_CHUNKS[0], {"multiple": 12}, "multiple is 12; it must be a multiple of the chunk's 8 tokens"),
        (_CHUNKS[0], {"causal": 2}, "causal is 2; it must be 0 or 1"),
    ],
    mixed=[(_CHUNKS[3], 45), (_CHUNKS[4], 33)],
    long=[
        (_CHUNKS[8], 1025, "right", 2, False),
        (Chunks(chunk=64, heads=1), 16384, "right", 1, True),
    ],
    measured=[_CHUNKS[0], _CHUNKS[1], _CHUNKS[4]],
    wrong=lambda layer: [
        replace(layer, before=layer.before + 1),
        replace(layer, after=layer.after + 1),
        replace(layer, chunk=layer.chunk + 1),
        replace(layer, causal=1 - layer.causal),
    ],
    counts=lambda layer, order: {"TopK": 0, "ScatterElements": 0} | scans(order, 1),
    names={
        _CHUNKS[0]: "ChunkAttention_chunk8_before1_after0_of8",
        _CHUNKS[4]: "ChunkAttention_chunk8_before0_after2_of8_causal",
    },
    bodiless=[(Chunks(chunk=0), "chunk is 0"), (Chunks(before=-1), "before is -1")],
    # Measured 1.9e-6; values reach 2.9.
    chain=((_CHUNKS[0], Chunks(after=1, multiple=2), _CHUNKS[0]), 4e-6),
    repeated=_CHUNKS[0],
    once={BlockOrder.PARALLEL: {"Range": None, "Less": 1}},
    choices=1,
    wide=_WIDE_CHUNKS,
    built=[
        (replace(_WIDE_CHUNKS, dtype="float16"), False),
        (replace(_WIDE_CHUNKS, after=1, multiple=4, causal=1), True),
    ],
    span=lambda layer: layer.chunk * (layer.before + 1 + layer.after),
    lowered=dict.fromkeys((_CHUNKS[0], _CHUNKS[4], Chunks(chunk=5, before=3, multiple=3))),
    lowered_atol=6e-6,  # measured 2.9e-6; values reach 6.4
    lowered_chain=(_CHUNKS[0], Chunks(after=1, multiple=2), _CHUNKS[0]),
    lowered_long=[],
    lowered_alike=((_CHUNKS[0], _CHUNKS[0], Chunks(after=1)), (1, 1), 0),
    lowered_wide=((Chunks(chunk=64), Chunks(chunk=64, after=1)), (16384, 32768), 32),
)
