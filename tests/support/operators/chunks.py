"""Chunk attention as tests need it: nodes, their keys in view counted by hand, and its particular cases."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hdplugins import OPERATORS
from hdplugins.attention.operator import BodyVariant
from hdplugins.kernels.block_config import HEAD_DIMS, BlockConfig
from support.attention_layers import PADDINGS, Description, SparseLayer, scans, token_kinds
from support.kernel_cases import KERNEL_DTYPES, KernelDescription, block_config_of_gpu, kernel_case


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


NODES = (
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

DESCRIPTION = Description(
    layers=NODES,
    by_hand=[
        (layer, token_kinds(padding, tokens, batch=2))
        for layer in (NODES[1], *NODES[3:8])
        for padding, tokens in (("right", 29), ("holes", 13), ("none", 5))
    ],
    dense=(NODES[0], 8),
    undefined=[
        (NODES[0], {"chunk": 0}, "chunk is 0; it must be 1 or more"),
        (NODES[0], {"before": -1}, "before is -1; it must be 0 or more"),
        (NODES[0], {"after": -2}, "after is -2; it must be 0 or more"),
        (NODES[0], {"multiple": 12}, "multiple is 12; it must be a multiple of the chunk's 8 tokens"),
        (NODES[0], {"causal": 2}, "causal is 2; it must be 0 or 1"),
    ],
    mixed=[(NODES[3], 45), (NODES[4], 33)],
    long=[
        (NODES[8], 1025, "right", 2, False),
        (Chunks(chunk=64, heads=1), 16384, "right", 1, True),
    ],
    measured=[NODES[0], NODES[1], NODES[4]],
    wrong=lambda layer: [
        replace(layer, before=layer.before + 1),
        replace(layer, after=layer.after + 1),
        replace(layer, chunk=layer.chunk + 1),
        replace(layer, causal=1 - layer.causal),
    ],
    counts=lambda layer, variant: {"TopK": 0, "ScatterElements": 0} | scans(variant, 1),
    names={
        NODES[0]: "ChunkAttention_chunk8_before1_after0_of8",
        NODES[4]: "ChunkAttention_chunk8_before0_after2_of8_causal",
    },
    bodiless=[(Chunks(chunk=0), "chunk is 0"), (Chunks(before=-1), "before is -1")],
    # Measured 1.9e-6; values reach 2.9.
    chain=((NODES[0], Chunks(after=1, multiple=2), NODES[0]), 4e-6),
    repeated=NODES[0],
    once={BodyVariant.BATCHED: {"Range": None, "Less": 1}},
    choices=1,
    wide=_WIDE_CHUNKS,
    built=[
        (replace(_WIDE_CHUNKS, dtype="float16"), False),
        (replace(_WIDE_CHUNKS, after=1, multiple=4, causal=1), True),
    ],
    span=lambda layer: layer.chunk * (layer.before + 1 + layer.after),
    lowered=dict.fromkeys((NODES[0], NODES[4], Chunks(chunk=5, before=3, multiple=3))),
    lowered_atol=6e-6,  # measured 2.9e-6; values reach 6.4
    lowered_chain=(NODES[0], Chunks(after=1, multiple=2), NODES[0]),
    lowered_long=[],
    lowered_alike=((NODES[0], NODES[0], Chunks(after=1)), (1, 1), 0),
    lowered_wide=((Chunks(chunk=64), Chunks(chunk=64, after=1)), (16384, 32768), 32),
)


def chunk_mask(tokens: int) -> torch.Tensor:
    """[5, tokens]: a text of each padding."""
    return torch.cat([torch.from_numpy(token_kinds(padding, tokens, batch=1)) for padding in PADDINGS])


def _chunk_cases() -> list[Any]:
    """Texts of lengths around chunks under every padding, and chunks that see so many before and after."""
    cases = [kernel_case(tokens, layer=_CHUNK, kinds=chunk_mask(tokens)) for tokens in (1, 7, 8, 17)]

    def case(*name: object, tokens: int, size: float = 1, **changes: Any) -> None:
        others = {key: changes.pop(key) for key in ("block_config", "is_nightly") if key in changes}
        # One text without padding and one with holes.
        kinds, layer = chunk_mask(tokens)[[0, 3]], replace(_CHUNK, **changes)
        cases.append(kernel_case(*name, layer=layer, kinds=kinds, size=size, **others))

    # Of three chunks and of five: a step of more leads nowhere.
    for tokens, before, after, causal in ((20, 1, 0, 1), (37, 2, 3, 0), (20, 9, 0, 1)):
        case("sees", before, after, "of", tokens, tokens=tokens, before=before, after=after, causal=causal)
    for chunk, multiple, tokens in ((5, 3, 37), (40, 1, 70)):
        case("chunks of", chunk, "times", multiple, tokens=tokens, chunk=chunk, multiple=multiple)
    for head_dim, dtype in itertools.product(HEAD_DIMS, KERNEL_DTYPES):
        changes: dict[str, Any] = {"chunk": 64, "head_dim": head_dim, "dtype": dtype}
        block_config, is_nightly = block_config_of_gpu(replace(_CHUNK, **changes)), (head_dim, dtype) != (64, "float16")
        case("heads of", head_dim, dtype, tokens=150, block_config=block_config, is_nightly=is_nightly, **changes)
    case("scores far beyond exp", tokens=37, size=1000)
    return cases


UNDEFINED_CHUNKS = [
    ({"chunk": 0}, "chunk is 0; it must be 1 or more"),
    ({"before": -1}, "before is -1; it must be 0 or more"),
    ({"multiple": 96}, "multiple is 96; it must be a multiple of the chunk's 64 tokens"),
    ({"causal": 2}, "causal is 2; it must be 0 or 1"),
    ({"multiple": 2**30}, "1000 tokens padded to a multiple of 1073741824, .* too many for the kernels"),
    ({"after": 2**30}, "and 1073741824 after, are too many for the kernels"),
]
_CHUNK = Chunks(heads=1)
CIRCLE_BLOCK_CONFIG = BlockConfig(block_m=16, block_n=16, num_warps=4, num_stages=2, block_d=32)

KERNELS = KernelDescription(
    block_config=CIRCLE_BLOCK_CONFIG,
    cases=_chunk_cases(),
    # Each chunk sees the next one, of which the sixth is the first that holds NaN.
    not_loaded=(replace(_CHUNK, chunk=16, before=0, after=1), 112, 80, 64, 64),
    fitting=Chunks(chunk=64, heads=12, head_dim=64),
    refused=UNDEFINED_CHUNKS,
)

PLUGIN_NODE = Chunks(chunk=16, multiple=2)
