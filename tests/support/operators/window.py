"""Sliding windows as tests need them: nodes, their keys in view counted by hand, and their particular cases."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hdplugins import OPERATORS
from hdplugins.attention.operator import BodyVariant
from hdplugins.attention.window.plugin import WINDOW_HEAD_DIMS
from hdplugins.kernels.block_config import BlockConfig
from support.attention_layers import Description, SparseLayer, scans, token_kinds
from support.kernel_cases import KERNEL_DTYPES, KernelDescription, block_config_of_gpu, kernel_case, row_of_kinds


@dataclass(frozen=True, kw_only=True)
class Window(SparseLayer):
    """A node SlidingWindowAttention."""

    operator = OPERATORS["SlidingWindowAttention"]
    left: int
    right: int
    dilation: tuple[int, ...] = (1,)
    bound: int = 0  # type: ignore[misc]

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            "left": self.left,
            "right": self.right,
            "dilation": self.dilation,
            "global_bound": self.bound,
        }

    def by_pytorch(self, states: Sequence[torch.Tensor], feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of its fused attention with a dense mask."""
        tokens, heads, head_dim = states[0].shape[1:]
        steps = torch.tensor(self.dilation * (heads // len(self.dilation)))[:, None, None]
        offset = torch.arange(tokens) - torch.arange(tokens)[:, None]
        near = (offset >= -self.left * steps) & (offset <= self.right * steps) & (offset % steps == 0)
        kind = feeds["token_kind"][:, None, None]
        seen = ((kind == 2) | ((kind == 1) & near)) & (kind != 0).mT
        of_heads = (state.transpose(1, 2) for state in states)
        attended = torch.nn.functional.scaled_dot_product_attention(
            *of_heads, attn_mask=seen, scale=head_dim**-0.5, enable_gqa=self.is_grouped
        )
        return attended.masked_fill(~seen.any(-1, keepdim=True), 0).transpose(1, 2)

    @property
    def lengths(self) -> list[int]:
        """The window's reach in tokens and twice that, one less and one more."""
        reach = min(max(self.left, self.right, 1), 256) * max(self.dilation)
        return sorted({1, 31, 211, reach - 1, reach, reach + 1, 2 * reach, 2 * reach + 1} - {0})

    def keys_by_hand(self, kinds: np.ndarray, vectors: np.ndarray, head: int, query: int) -> list[int]:
        step = self.dilation[head % len(self.dilation)]
        in_window = {query + step * offset for offset in range(-self.left, self.right + 1)}
        return [key for key, kind in enumerate(kinds) if kind == 2 or (kind == 1 and key in in_window)]


NODES = (
    Window(left=1, right=1, bound=4, head_dim=64),
    Window(left=1, right=1, dtype="float16"),
    Window(left=16, right=16, bound=40, heads=1, dtype="float16"),
    Window(left=16, right=16, head_dim=80),
    Window(left=0, right=0, bound=3),
    Window(left=16, right=0, bound=5, dtype="float16"),
    Window(left=0, right=16),
    Window(left=7, right=64, bound=9, head_dim=80, dtype="float16"),
    Window(left=64, right=64, bound=64, head_dim=64),
    Window(left=64, right=64, dilation=(2,), bound=5),
    Window(left=16, right=16, dilation=(1, 3, 1, 2), heads=4, bound=5, dtype="float16"),
    Window(left=5, right=16, dilation=(4, 1), head_dim=64),
    Window(left=256, right=256, bound=5, heads=1, head_dim=64),
    Window(left=256, right=256, heads=1, dtype="float16"),
    Window(left=5000, right=5000, bound=5, heads=1),
    Window(left=16, right=16, heads=6, kv_heads=2, bound=5),
    Window(left=9, right=40, dilation=(2,), heads=4, kv_heads=1, head_dim=256, dtype="float16"),
    Window(left=5, right=16, dilation=(4, 1, 1, 4), heads=4, kv_heads=2, bound=3),
)
_GROUPED = NODES[15]
_FIVE = Window(left=16, right=16, bound=5)
_FEW_OF_MANY = Window(left=16, right=7, bound=40)
_TWO_STEPS = replace(_FIVE, dilation=(1, 3))
_WIDE_WINDOW = Window(left=256, right=256, heads=4, head_dim=64, dtype="float16")
_NO_STEP, _NEGATIVE = "is invalid: give one value", "is negative"

DESCRIPTION = Description(
    layers=NODES,
    by_hand=[
        (
            Window(left=left, right=right, dilation=dilation, bound=4),
            token_kinds("left", 13, globals_="scattered", bound=4),
        )
        for dilation in ((1,), (2, 1), (3,))
        for left, right in ((0, 0), (2, 1), (0, 3), (20, 20))
    ]
    + [(layer, token_kinds("holes", 37, globals_="scattered", bound=3)) for layer in NODES[15::2]]
    + [
        (Window(left=4, right=2, dilation=dilation, bound=1), token_kinds("unseen", 41, globals_=globals_, bound=1))
        for dilation in ((1,), (2, 1))
        for globals_ in ("none", "first")
    ],
    dense=(Window(left=64, right=64, bound=5), 61),
    undefined=[
        (Window(left=2, right=2, bound=4), change, message)
        for change, message in (
            ({"left": -1}, "-1 left and 2 right"),
            ({"right": -3}, "2 left and -3 right"),
            ({"dilation": [0]}, r"\[0\] does not fit 2 heads"),
            ({"dilation": []}, r"\[\] does not fit 2 heads"),
            ({"dilation": [1, 2, 3]}, r"\[1, 2, 3\] does not fit 2 heads"),
            ({"global_bound": 3}, "4 global tokens; global_bound is 3"),
        )
    ],
    # With 40 globals in 33 tokens, a text is shorter than its bound; with 97, it is not.
    mixed=[*((NODES[2], tokens) for tokens in (1, 4, 33)), (_GROUPED, 97), (NODES[2], 97)],
    long=[
        *((NODES[number], 1000, "right", 1, number != 12) for number in (8, 10, 12, 14, 16)),
        *(
            (Window(left=256, right=256, bound=40, heads=1), tokens, "left", 1, tokens > 3000)
            for tokens in (2047, 4095, 4096)
        ),
    ],
    measured=[NODES[0], NODES[8], NODES[11], _GROUPED],
    wrong=lambda layer: [
        replace(layer, left=layer.left - 1),
        replace(layer, left=layer.left + 1),
        replace(layer, right=layer.right - 1),
        replace(layer, right=layer.right + 1),
        replace(layer, dilation=tuple(step + 1 for step in layer.dilation)),
    ],
    counts=lambda layer, variant: {"TopK": layer.bound > 0} | scans(variant, len(set(layer.dilation))),
    names={
        Window(left=1, right=1): "SlidingWindowAttention",
        Window(left=1, right=1, dilation=(1, 1)): "SlidingWindowAttention",
        Window(left=1, right=1, bound=64): "SlidingWindowAttention_global64",
        Window(left=1, right=1, dilation=(2, 2)): "SlidingWindowAttention_dilation2",
        Window(left=1, right=1, dilation=(1, 3), bound=5): "SlidingWindowAttention_global5_dilation1_3",
        Window(left=1, right=1, kv_heads=2): "SlidingWindowAttention",
        Window(left=1, right=1, kv_heads=1, bound=64): "SlidingWindowAttention_grouped_global64",
    },
    bodiless=[
        (Window(left=1, right=1, dilation=()), _NO_STEP),
        (Window(left=1, right=1, dilation=(0,)), _NO_STEP),
        (Window(left=1, right=1, dilation=(1, -2)), _NO_STEP),
        (Window(left=1, right=1, bound=-1), _NEGATIVE),
    ],
    # Measured 1.7e-6: three layers hold what one holds.
    chain=(
        (
            Window(left=3, right=3, bound=5),
            Window(left=16, right=9, bound=5),
            Window(left=4, right=4, dilation=(2, 3), bound=5),
        ),
        4e-6,
    ),
    repeated=NODES[8],
    once={
        BodyVariant.BATCHED: {"TopK": 1, "Range": None},
        # A Scan takes each table as often as there are texts.
        BodyVariant.BLOCKWISE: {"TopK": 1, "Tile": 2},
    },
    choices=1,
    wide=replace(_WIDE_WINDOW, bound=40, dtype="float32"),
    built=[
        (_WIDE_WINDOW, True),
        (replace(_WIDE_WINDOW, bound=64), True),
        (replace(_WIDE_WINDOW, right=0, bound=64, head_dim=80, dtype="bfloat16"), False),
        (replace(_WIDE_WINDOW, kv_heads=2, head_dim=256), True),
        (replace(_WIDE_WINDOW, kv_heads=1, dilation=(2, 1, 1, 2), bound=5), True),
        (Window(left=64, right=64, bound=5, heads=4, head_dim=64), True),
        (Window(left=64, right=64, dilation=(1, 1, 2, 3), bound=5, heads=4, head_dim=64, dtype="float16"), True),
        (Window(left=64, right=64, dilation=(1, 3), bound=5, heads=2, head_dim=64), True),
    ],
    span=lambda layer: 128 + layer.left + layer.right + layer.bound,
    lowered={
        Window(left=16, right=16): 17,
        _FIVE: 17,
        _FEW_OF_MANY: 8,
        Window(left=0, right=16): 1,
        replace(_FIVE, dilation=(1, 1)): 17,
        _TWO_STEPS: None,
        Window(left=5000, right=5000, bound=3): 5001,
        Window(left=16, right=7, kv_heads=1, bound=5): 8,
        Window(left=16, right=7, kv_heads=1, dilation=(1, 3)): None,
    },
    lowered_atol=8e-6,  # measured 5.9e-6; values reach 5.7
    lowered_chain=(_FIVE, Window(left=64, right=64, bound=9), _TWO_STEPS, _FEW_OF_MANY, _FIVE),
    lowered_long=[(Window(left=256, right=256, bound=16), 1000, 2)],
    lowered_alike=((Window(left=16, right=16), _FIVE, _FIVE, _TWO_STEPS), (1, 1, 2), 3),
    lowered_wide=((Window(left=256, right=256, bound=16), Window(left=64, right=64)), (4096, 8192), 8),
)


def _window_cases() -> list[Any]:
    def case(*name: object, kinds: torch.Tensor, **call: Any) -> None:
        others = {key: call.pop(key) for key in ("size", "block_config", "is_nightly") if key in call}
        bound = int((kinds == 2).sum(1).max())
        window = Window(**{"left": 16, "right": 16, "heads": 1, "bound": bound, **call})
        cases.append(kernel_case(*name, layer=window, kinds=kinds, **others))

    cases: list[Any] = []
    for tokens, globals_ in ((1, ()), (15, ()), (17, ()), (32, (0,)), (33, (0, 3, 16, 17, 28)), (16, range(16))):
        case("globals", len(globals_), "of", tokens, kinds=row_of_kinds(tokens, globals_))
    for left, right, globals_ in ((40, 0, (0, 3, 65)), (0, 16, ()), (2**31, 2**40, ())):
        case("window", left, right, kinds=row_of_kinds(131, globals_), left=left, right=right)
    for name, globals_, padding in (
        ("right", (), range(65, 97)),
        ("left", (0,), range(32)),
        ("both sides and a hole", (0, 3, 48, 49, 92), (*range(19), 48, *range(78, 97))),
        ("all", (0, 3, 48), range(97)),
    ):
        case("padding", name, kinds=row_of_kinds(97, globals_, padding), left=40, right=40)
    rows = [row_of_kinds(97, [0, 50]), row_of_kinds(97, [], range(41, 97)), row_of_kinds(97, range(20), range(90, 97))]
    case("texts of a batch", kinds=torch.cat(rows))
    # Of the last dilation, each token is a program.
    for tokens, dilation in ((61, (1, 2, 7)), (131, (5,)), (7, (2**31 - 1,))):
        kinds = row_of_kinds(tokens, [0, 3, tokens // 2], range(tokens - tokens // 3, tokens))
        case("dilation", *dilation, kinds=kinds, left=9, right=5, dilation=dilation, heads=len(dilation))
    for head_dim, dtype in itertools.product(WINDOW_HEAD_DIMS, KERNEL_DTYPES):
        size: dict[str, Any] = {"head_dim": head_dim, "dtype": dtype}
        size["block_config"] = block_config_of_gpu(replace(_SQUARE, **size))
        kinds, is_nightly = row_of_kinds(300, [0, 150], range(280, 300)), (head_dim, dtype) != (80, "float16")
        case("heads of", head_dim, dtype, kinds=kinds, left=100, right=90, is_nightly=is_nightly, **size)
    case("heads of 128 in parts", kinds=row_of_kinds(61, [0]), block_config=BlockConfig(32, 16, 4, 2, 64), head_dim=128)
    kinds = torch.cat([row_of_kinds(97, [0, 50]), row_of_kinds(97, [], range(41, 60))])
    case("groups of 2", kinds=kinds, heads=2, kv_heads=1, dilation=(3,))
    case("scores far beyond exp", kinds=row_of_kinds(61, [0, 30]), size=1000)
    case("bound above 2 globals", kinds=row_of_kinds(61, [5, 40]), bound=70)
    return cases


_SQUARE = Window(left=16, right=16, heads=1)


KERNELS = KernelDescription(
    block_config=BlockConfig(block_m=32, block_n=16, num_warps=4, num_stages=2, block_d=32),
    cases=_window_cases(),
    # Blocks of 32 queries: the last one whose windows end before token 128 is the third.
    not_loaded=(_SQUARE, 200, 128, 96, 128),
    fitting=Window(left=256, right=256, heads=12, head_dim=64, bound=16),
    refused=[
        ({"left": -1}, "left is -1; it must be 0 or more"),
        ({"global_bound": -1}, "global_bound is -1; it must be 0 or more"),
        ({"dilation": (1, 2)}, r"dilation is \[1, 2\]; it must have 1 value or 12, one per head, each 1 or more"),
    ],
)

PLUGIN_NODE = Window(left=16, right=16, bound=5)
