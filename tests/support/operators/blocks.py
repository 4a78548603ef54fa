"""Block-sparse attention as tests need it: nodes, their keys in view counted by hand, and its particular cases."""

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
from support.attention_layers import Description, SparseLayer, scans, token_kinds
from support.kernel_cases import KERNEL_DTYPES, KernelDescription, block_config_of_gpu, kernel_case


@dataclass(frozen=True, kw_only=True)
class Blocks(SparseLayer):
    """A node BlockSparseAttention; `listed` is the shape of a table with repeats and invalid entries."""

    operator = OPERATORS["BlockSparseAttention"]
    block: int = 8
    first: int = 1
    last: int = 1
    window: int = 1
    repeats: int = 0
    dense: int = 0
    by_row: int = 0
    listed: tuple[int, int, int] | None = None

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            "block_size": self.block,
            "first_global": self.first,
            "last_global": self.last,
            "window": self.window,
            "first_repeats": self.repeats,
            "dense_tokens": self.dense,
            "ends_by_row": self.by_row,
        }

    @property
    def constants(self) -> dict[str, np.ndarray]:
        """The table, [1 or heads, rows, listed], by its shape."""
        if self.listed is None:
            return {}
        table = np.random.default_rng(7).integers(-2, self.listed[1] + 4, self.listed)
        return {"table_" + "x".join(map(str, self.listed)): table.astype(np.int32)}

    @property
    def lengths(self) -> list[int]:
        """A few blocks, the longest dense text and the blocks of the window, one less and one more."""
        edges = {self.block, 2 * self.block, self.dense, self.block * (self.first + self.last + 2 * self.window + 1)}
        return sorted({1, 113, *(edge + shift for edge in edges if edge >= 0 for shift in (-1, 0, 1))} - {-1, 0})

    def keys_by_hand(self, kinds: np.ndarray, vectors: np.ndarray, head: int, query: int) -> list[int]:
        tokens, size = len(kinds), self.block
        end = 1 + max((i for i in range(tokens) if kinds[i]), default=-1) if self.by_row else tokens
        last, own = math.ceil(end / size) - 1, query // size
        if end <= self.dense or own < self.first or (self.last and own == last):
            blocks = list(range(tokens // size + 1))
        else:
            near = range(own - self.window, own + self.window + 1)
            blocks = sorted({*range(self.first), *([last] if self.last else []), *near}) + [0] * self.repeats
            for table in self.constants.values():
                if own - self.first < table.shape[1]:
                    blocks += table[head % len(table), own - self.first].tolist()
        return [key for block in blocks for key in range(tokens) if key // size == block and kinds[key]]


_BIGBIRD = Blocks(repeats=2, dense=72)

_LISTED = Blocks(dense=72, listed=(2, 14, 2))

NODES = (
    _BIGBIRD,
    replace(_BIGBIRD, by_row=1, dtype="float16"),
    _LISTED,
    replace(_LISTED, by_row=1, repeats=1, listed=(1, 5, 3), heads=3),
    Blocks(last=0, first=3),  # ETC
    Blocks(last=0, first=2, window=0, listed=(2, 9, 1), dtype="float16"),
    Blocks(first=0, last=0, window=-1, listed=(2, 11, 3)),  # any list of blocks
    Blocks(first=0, last=0, window=-1, listed=(1, 11, 3), dense=20, by_row=1),
    Blocks(first=3, window=2, block=5, repeats=1, by_row=1, head_dim=80, dtype="float16"),
    Blocks(first=0, window=0, repeats=3, block=1),
    Blocks(window=-1, dense=9, heads=1),
    Blocks(first=0, last=0, window=3, block=16, heads=1),
)

_WIDE_BLOCKS = Blocks(block=64, dense=704, heads=4, head_dim=64)

DESCRIPTION = Description(
    layers=NODES,
    by_hand=[
        (layer, token_kinds(padding, layer.dense + 3 * layer.block + 1, batch=2))
        for layer in NODES
        for padding in ("right", "holes")
    ],
    dense=(_BIGBIRD, 72),
    undefined=[
        (_LISTED, {"block_size": 0}, "block_size is 0; it must be 1 or more"),
        (_LISTED, {"window": -2}, "window is -2; it must be -1 or more"),
        (_LISTED, {"dense_tokens": -1}, "dense_tokens is -1; it must be 0 or more"),
        (
            _LISTED,
            {"listed_blocks": torch.zeros(3, 4, 2, dtype=torch.int32)},
            r"listed_blocks is \[3, 4, 2\]; with 2 heads it is \[1 or 2, rows, listed\]",
        ),
    ],
    # Half are 66 tokens: dense where texts end by row, and the table is one for blocks of longer texts.
    mixed=[(NODES[number], 131) for number in (1, 2, 7, 3)],
    long=[
        (
            Blocks(block=64, repeats=3, dense=704, listed=(1, 12, 2), heads=1, head_dim=64, by_row=1),
            1025,
            "right",
            2,
            False,
        ),
    ],
    measured=[_BIGBIRD, NODES[1], _LISTED],
    wrong=lambda layer: [
        replace(layer, repeats=layer.repeats + 1),
        replace(layer, first=0),
        replace(layer, first=2),
        replace(layer, last=0),
        replace(layer, window=0),
        replace(layer, window=2),
        replace(layer, block=layer.block + 1),
        replace(layer, by_row=1 - layer.by_row),
        replace(layer, dense=211),
        replace(layer, listed=(1, 5, 3)),
    ],
    counts=lambda layer, variant: scans(variant, 1 + (layer.first + layer.last > 0)),
    names={_BIGBIRD: "BlockSparseAttention_first_last_window1_dense"},
    bodiless=[(Blocks(first=0, last=0, window=-1), "its queries see nothing")],
    # Measured 5.2e-7; values reach 1.6.
    chain=(
        (_BIGBIRD, _LISTED, replace(_BIGBIRD, block=16, dense=100), replace(_LISTED, listed=(1, 5, 3)), _BIGBIRD),
        2e-6,
    ),
    repeated=replace(_BIGBIRD, by_row=1),
    once={BodyVariant.BLOCKWISE: dict.fromkeys(("ReduceMax", "Log", "Equal", "Pad"))},
    choices=1,
    wide=replace(_WIDE_BLOCKS, listed=(4, 200, 3)),
    built=[
        (replace(_WIDE_BLOCKS, repeats=3, by_row=1, dtype="float16"), True),
        (replace(_WIDE_BLOCKS, listed=(4, 254, 3)), True),
        (replace(_WIDE_BLOCKS, dense=0, first=2, last=0, head_dim=80, dtype="bfloat16"), False),
        (
            replace(_WIDE_BLOCKS, dense=0, first=0, last=0, window=-1, listed=(1, 256, 5), dtype="float16"),
            True,
        ),
    ],
    span=lambda layer: max(
        64 * (layer.first + layer.last + 2 * layer.window + 1 + (layer.listed or (0, 0, 0))[2]), layer.dense
    ),
    lowered={
        _BIGBIRD: 72,
        replace(_BIGBIRD, by_row=1): 72,
        Blocks(listed=(2, 9, 2), dense=40): 40,
        Blocks(first=2, last=0): 32,
        Blocks(first=0, last=0, window=-1, listed=(1, 9, 3)): None,
        Blocks(block=5, window=-1, repeats=1): 10,
        Blocks(block=5, first=0, window=2): 20,
    },
    lowered_atol=6e-6,  # measured 2.7e-6; values reach 5.2
    lowered_chain=(
        _BIGBIRD,
        Blocks(listed=(2, 9, 2), dense=40),
        Blocks(first=2, last=0),
        Blocks(first=0, last=0, window=-1, listed=(1, 9, 3)),
        Blocks(listed=(1, 5, 3), dense=40),
        _BIGBIRD,
    ),
    lowered_long=[],
    lowered_alike=((_BIGBIRD, _BIGBIRD, replace(_BIGBIRD, block=16)), (2,), 3),
    lowered_wide=(
        (Blocks(block=64, repeats=3, dense=300), Blocks(block=64, listed=(2, 254, 3))),
        (8192, 16384),
        16,
    ),
)


def block_mask(tokens: int) -> torch.Tensor:
    """[3, tokens]: no padding; padding behind and a hole; real tokens here and there, none in the first 16."""
    mask = torch.ones(3, tokens, dtype=torch.int32)
    mask[1, tokens - tokens // 3 :] = 0
    mask[1, tokens // 4] = 0
    mask[2] = (torch.arange(tokens) % 3 == 1) & (torch.arange(tokens) >= min(16, tokens // 2))
    return mask


_PLAIN = Blocks(block=16, first=0, last=0)
_HF_EVAL = Blocks(block=16, repeats=3)
_DENSE = 50
"""Tokens of a text that is short: neither a whole number of blocks nor a length of the tests."""

BLOCK_MODES = {
    "hf_eval": _HF_EVAL,
    "table": replace(_HF_EVAL, repeats=0, listed=(2, 5, 2)),
    "etc": replace(_PLAIN, first=2),
    "blocks": replace(_PLAIN, window=-1, listed=(1, 9, 3)),
}


def _block_cases() -> list[Any]:
    cases: list[Any] = []

    def case(*name: object, **call: Any) -> None:
        cases.append(kernel_case(*name, **call))

    for mode, tokens, by_row in (
        ("hf_eval", 1, 1),
        ("hf_eval", 16, 0),
        ("hf_eval", 33, 1),
        ("table", 16, 0),
        ("etc", 33, 0),
        ("blocks", 33, 1),
    ):
        layer = BLOCK_MODES[mode]
        layer = replace(layer, by_row=by_row, dense=_DENSE * by_row, heads=2 if layer.listed else 1)
        case(mode, tokens, layer=layer, kinds=block_mask(tokens))
    for tokens, by_row in ((_DENSE, 1), (_DENSE + 1, 0)):
        mask = torch.zeros(2, 70 if by_row else tokens, dtype=torch.int32)
        mask[:, :tokens] = 1
        case("dense up to 50:", tokens, by_row, layer=replace(_HF_EVAL, dense=_DENSE, by_row=by_row), kinds=mask)
    mask = torch.zeros(2, 40, dtype=torch.int32)
    mask[1, 20] = 1
    case("nothing but padding", layer=replace(_HF_EVAL, by_row=1), kinds=mask)
    mask = torch.ones(1, 520, dtype=torch.int32)
    mask[0, 150:400:7] = 0
    layer = replace(_HF_EVAL, block=128, first=2, by_row=1, dense=100, heads=1)
    case("a text in parts", layer=layer, kinds=mask, block_config=BlockConfig(128, 128, 4, 2, 32))
    for window, first in ((2, 0), (-1, 2**31 - 1)):
        layer = replace(_PLAIN, window=window, first=first, heads=1)
        case("window", window, first, layer=layer, kinds=block_mask(79))
    for block in (5, 84):
        layer = replace(_HF_EVAL, block=block, heads=1, dtype="float16")
        mask = block_mask(min(3 * block + block // 2 + 4, 300))[1:]
        case("blocks of", block, layer=layer, kinds=mask, block_config=block_config_of_gpu(layer))
    for head_dim, dtype in itertools.product(HEAD_DIMS, KERNEL_DTYPES):
        layer = replace(_HF_EVAL, block=128, heads=1, head_dim=head_dim, dtype=dtype)
        block_config, is_nightly = block_config_of_gpu(layer), (head_dim, dtype) != (80, "float16")
        mask = block_mask(270)[1:2]
        case("heads of", head_dim, dtype, layer=layer, kinds=mask, block_config=block_config, is_nightly=is_nightly)
    return cases


KERNELS = KernelDescription(
    block_config=BlockConfig(block_m=16, block_n=16, num_warps=4, num_stages=2, block_d=32),
    cases=_block_cases(),
    # Block 4 is the first that sees block 5.
    not_loaded=(replace(_PLAIN, heads=1), 128, 80, 64, 64),
    fitting=Blocks(block=64, repeats=3, dense=704, heads=12, head_dim=64),
    refused=[
        ({"block_size": 2048}, "block_size is 2048; the kernels support blocks of 1 to 1024 tokens"),
        ({"window": -2}, "window is -2; it must be -1 to"),
        ({"last_global": 2}, "last_global is 2; it must be 0 to 1"),
        ({"last": (3, 62, 3)}, r"listed_blocks is \[3, 62, 3\]; for 12 heads it is \[1 or 12, rows, listed\]"),
        ({"last": (12, 62, 0)}, r"listed_blocks is \[12, 62, 0\]"),
        ({"block_size": 1, "query": (1, 2**20, 12, 64), "last": (12, 9, 2**20)}, "are too many"),
    ],
)

PLUGIN_NODE = Blocks(block=64, repeats=3, by_row=1)
