"""LSH attention as tests need it: nodes, their keys in view counted by hand, and its particular cases."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hdplugins import OPERATORS
from hdplugins.attention.lsh.reference import draw_rotations
from hdplugins.attention.operator import BodyVariant
from hdplugins.kernels.block_config import HEAD_DIMS, BlockConfig
from support.attention_layers import Description, scans, token_kinds
from support.kernel_cases import KERNEL_DTYPES, KernelDescription, block_config_of_gpu, kernel_case
from support.operators.chunks import CIRCLE_BLOCK_CONFIG, UNDEFINED_CHUNKS, Chunks, chunk_mask


@dataclass(frozen=True, kw_only=True)
class Lsh(Chunks):
    """A node LSHAttention."""

    operator = OPERATORS["LSHAttention"]
    buckets: tuple[int, ...] = (4,)
    rounds: int = 2
    by_row: int = 0

    @property
    def attributes(self) -> dict[str, Any]:
        return super().attributes | {"buckets": self.buckets, "rounds": self.rounds, "ends_by_row": self.by_row}

    @property
    def rotations(self) -> torch.Tensor:
        """[heads, head_dim, rounds, directions]."""
        sizes = {"heads": self.heads, "head_dim": self.head_dim, "buckets": self.buckets, "rounds": self.rounds}
        return draw_rotations(7, **sizes)

    @property
    def constants(self) -> dict[str, np.ndarray]:
        rotations = self.rotations.numpy()
        return {"rotations_" + "x".join(map(str, rotations.shape)): rotations}

    def keys_of(self, states: Mapping[str, np.ndarray]) -> np.ndarray:
        vectors = states["query_key"]
        return vectors / np.sqrt((vectors**2).mean(-1, keepdims=True) + 1e-6)

    def circle_by_hand(self, kinds: np.ndarray, vectors: np.ndarray, head: int) -> list[int]:
        """The tokens of all rounds in the order of their circle; -1 for padding."""
        circle: list[int] = []
        for number in range(self.rounds):
            found, start, group = np.zeros(len(kinds), np.int64), 0, 1
            for factor in self.buckets:
                half = vectors @ self.rotations.numpy()[head, :, number, start : start + factor // 2]
                found += group * np.concatenate([half, -half], axis=1).argmax(1)
                start, group = start + factor // 2, group * factor
            tokens = sorted(kinds.nonzero()[0].tolist(), key=found.__getitem__)
            padded = self.padded(len(tokens) if self.by_row else len(kinds))
            circle += tokens + [-1] * (padded - len(tokens))
        return circle

    def keys_by_hand(self, kinds: np.ndarray, vectors: np.ndarray, head: int, query: int) -> list[int]:
        circle, size = self.circle_by_hand(kinds, vectors, head), self.chunk
        owns = [place // size for place, token in enumerate(circle) if token == query]
        seen = [chunk for own in owns for chunk in self.chunks_by_hand(own, len(circle) // size)]
        keys = [key for chunk in seen for key in circle[size * chunk : size * (chunk + 1)] if key not in (-1, query)]
        return [key for key in keys if key < query or not self.causal] or [query]

    def looked_at(self, tokens: int, global_tokens: int = 0, **changes: torch.Tensor) -> int:
        """Queries in each of their rounds with the keys of the chunks that they see there, by hand."""
        kinds, size, found = np.ones(tokens, np.int32), self.chunk, 0
        for head, vectors in enumerate(np.random.default_rng(tokens).normal(size=(self.heads, tokens, self.head_dim))):
            circle = np.array(self.circle_by_hand(kinds, vectors, head)).reshape(-1, size) >= 0  # [chunks, chunk]
            for own, queries in enumerate(circle):
                seen = sorted(set(self.chunks_by_hand(own, len(circle))))
                found += int(queries.sum() * circle[seen].sum())
        return found

    def decided(self, states: torch.Tensor) -> torch.Tensor:
        """Tokens whose two largest products are close in any round are drawn again."""
        generator = torch.Generator().manual_seed(states.shape[1])
        while True:
            products = torch.einsum("bthd,hdrn->bthrn", states.double(), self.rotations.double())
            parts = products.split([factor // 2 for factor in self.buckets], dim=-1)
            tops = [torch.cat([part, -part], dim=-1).topk(2).values for part in parts]
            gaps = torch.stack([top[..., 0] - top[..., 1] for top in tops]).amin((0, -1))  # [batch, tokens, heads]
            close = gaps < 1e-3 * states.double().norm(dim=-1)
            if not close.any():
                return states
            drawn = torch.randn(states.shape, generator=generator).to(states.dtype)
            states = torch.where(close[..., None], drawn, states)


NODES = (
    Lsh(),
    Lsh(dtype="float16", rounds=3, multiple=2),
    Lsh(rounds=1, before=0, heads=1),
    Lsh(buckets=(4, 2), after=1, by_row=1),
    Lsh(buckets=(2,), rounds=4, causal=1, dtype="float16", by_row=1),
    Lsh(chunk=1, before=2, after=2, multiple=5),
    Lsh(chunk=5, before=3, multiple=3, buckets=(6, 4, 2), heads=3),
    Lsh(rounds=1, causal=1, head_dim=80),
    Lsh(chunk=64, buckets=(4, 8), head_dim=64),
)

_WIDE_LSH = Lsh(chunk=64, buckets=(16, 32), heads=4, head_dim=64)

_FEW_LSH = Lsh(chunk=64, buckets=(16, 32), heads=1)

DESCRIPTION = Description(
    layers=NODES,
    by_hand=[
        (layer, token_kinds(padding, tokens, batch=2))
        for layer in (*NODES[:2], *NODES[3:8])
        for padding, tokens in (("right", 29), ("holes", 13), ("none", 5), ("none", 1))
    ],
    dense=None,  # a token does not see itself
    undefined=[
        (NODES[0], {"chunk": 0}, "chunk is 0; it must be 1 or more"),
        (NODES[0], {"multiple": 12}, "multiple is 12; it must be a multiple of the chunk's 8 tokens"),
        (NODES[0], {"buckets": [3]}, r"buckets is \[3\]; it must be even numbers of 2 or more"),
        (NODES[0], {"buckets": []}, r"buckets is \[\]; it must be"),
        (NODES[0], {"rounds": 0}, "rounds is 0; it must be 1 or more"),
        (NODES[0], {"rounds": 3}, r"rotations is \[2, 32, 2, 2\]; .* \[2, 32, 3, 2\]"),
        (NODES[0], {"ends_by_row": 2}, "ends_by_row is 2; it must be 0 or 1"),
    ],
    mixed=[(NODES[0], 33), (NODES[3], 45), (NODES[4], 33)],
    long=[
        (NODES[8], 1025, "right", 2, False),
        (_FEW_LSH, 4097, "right", 1, False),
        *((_FEW_LSH, tokens, "right", 1, True) for tokens in (4095, 4096, 7680, 7681)),
        (replace(_FEW_LSH, heads=2, rounds=4), 16384, "holes", 1, True),
        (_FEW_LSH, 16384, "none", 1, True),
    ],
    measured=[NODES[0], NODES[1], NODES[3]],
    wrong=lambda layer: [
        replace(layer, before=layer.before + 1),
        replace(layer, after=layer.after + 1),
        replace(layer, chunk=layer.chunk + 1),
        replace(layer, causal=1 - layer.causal),
        replace(layer, rounds=layer.rounds + 1),
        replace(layer, buckets=(*layer.buckets, 2)),
        replace(layer, by_row=1 - layer.by_row),
    ],
    # TensorRT's TopK takes 3840 numbers: the batched variant counts instead.
    counts=lambda layer, variant: {"TopK": variant is BodyVariant.BLOCKWISE, "ScatterElements": 1} | scans(variant, 2),
    names={
        NODES[0]: "LSHAttention_chunk8_before1_after0_of8_rounds2_buckets4",
        NODES[3]: "LSHAttention_chunk8_before1_after1_of8_rounds2_buckets4x2_byrow",
    },
    bodiless=[(Lsh(chunk=0), "chunk is 0"), (Lsh(buckets=(5,)), "even numbers"), (Lsh(rounds=0), "rounds is 0")],
    # Measured 1.4e-6; values reach 2.8.
    chain=((NODES[0], Lsh(after=1), NODES[0]), 4e-6),
    repeated=NODES[3],
    once={BodyVariant.BATCHED: {"Max": 1, "Less": 1}},
    choices=3,
    wide=_WIDE_LSH,
    built=[
        (replace(_WIDE_LSH, dtype="float16", by_row=1), False),
        (replace(_WIDE_LSH, rounds=1, after=1, multiple=4, causal=1), True),
        (replace(_WIDE_LSH, rounds=4, dtype="bfloat16"), True),
    ],
    span=lambda layer: layer.rounds * layer.chunk * (layer.before + 1 + layer.after),
    lowered=dict.fromkeys((NODES[0], NODES[3], Lsh(rounds=1), Lsh(chunk=5, before=3, multiple=3, causal=1))),
    lowered_atol=2e-5,  # measured 1.1e-5 in a chain, where PyTorch's is 2.6e-5; values reach 5.4
    lowered_chain=(NODES[0], Lsh(after=1), NODES[0]),
    lowered_long=[(replace(_FEW_LSH, heads=2), 4097, 1)],
    lowered_alike=((NODES[0], NODES[0], Lsh(after=1)), (2, 2), 0),
    lowered_wide=((Lsh(chunk=64, buckets=(16, 32)), Lsh(chunk=64, rounds=1)), (8192, 16384), 16),
)


def _lsh_cases() -> list[Any]:
    base = Lsh(heads=1)
    cases = [kernel_case(tokens, layer=base, kinds=chunk_mask(tokens)) for tokens in (1, 8)]
    for name, tokens, changes in (
        ("sees 1 1, causal", 20, {"before": 1, "after": 1, "causal": 1}),
        ("sees nothing else", 37, {"before": 0}),
        ("a round by row, causal", 28, {"rounds": 1, "by_row": 1, "causal": 1}),
    ):
        cases.append(kernel_case(name, layer=replace(base, **changes), kinds=chunk_mask(tokens)[[0, 3]]))
    layer = replace(base, head_dim=80, chunk=16, rounds=1)
    cases.append(
        kernel_case(
            "few tokens of 80",
            layer=layer,
            kinds=chunk_mask(37)[1:2],
            block_config=replace(CIRCLE_BLOCK_CONFIG, block_d=64),
        )
    )
    cases.append(kernel_case("mean squares of 1e-6", layer=base, kinds=chunk_mask(37)[:1], size=1e-3))
    for head_dim, dtype in itertools.product(HEAD_DIMS, KERNEL_DTYPES):
        layer = replace(base, chunk=64, head_dim=head_dim, dtype=dtype)
        call = {"kinds": chunk_mask(150)[[0, 3]], "block_config": block_config_of_gpu(layer)}
        cases.append(kernel_case("heads of", head_dim, dtype, layer=layer, is_nightly=True, **call))
    # Spans of several steps.
    layer = replace(base, chunk=64, buckets=(600,), rounds=1, multiple=3)
    call = {"kinds": chunk_mask(400)[2:3], "block_config": BlockConfig(64, 64, 4, 2, 32)}
    cases.append(kernel_case("many tokens", layer=layer, is_nightly=True, **call))
    return cases


KERNELS = KernelDescription(
    block_config=CIRCLE_BLOCK_CONFIG,
    cases=_lsh_cases(),
    not_loaded=None,
    fitting=Lsh(chunk=64, heads=12, head_dim=64, buckets=(16, 4), rounds=4),
    refused=[
        *UNDEFINED_CHUNKS,
        ({"buckets": (16, 3)}, r"buckets is \[16, 3\]; it must be even numbers of 2 or more"),
        ({"rounds": 0}, "rounds is 0; it must be 1 or more"),
        ({"buckets": (32,)}, r"rotations is \[12, 64, 4, 10\]; it must be .*, \[12, 64, 4, 16\]"),
        ({"ends_by_row": 2}, "ends_by_row is 2; it must be 0 or 1"),
        ({"buckets": (2**15, 2**16), "last": (12, 64, 4, 49152)}, r"buckets is \[32768, 65536\]: too many"),
    ],
)

PLUGIN_NODE = Lsh(chunk=16, buckets=(4, 2), by_row=1)
