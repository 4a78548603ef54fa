"""The operator DenseAttention as tests need it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch

from hdplugins import OPERATORS
from hdplugins.attention.operator import BodyVariant
from hdplugins.attention.window.plugin import WINDOW_HEAD_DIMS
from hdplugins.kernels.block_config import BlockConfig
from support.attention_layers import PADDINGS, Layer, token_kinds
from support.kernel_cases import KERNEL_DTYPES, KernelDescription, block_config_of_gpu, kernel_case


@dataclass(frozen=True, kw_only=True)
class Dense(Layer):
    """A node DenseAttention."""

    operator = OPERATORS["DenseAttention"]
    causal: int = 0

    @property
    def attributes(self) -> dict[str, Any]:
        return {"causal": self.causal}

    @property
    def answers_padding(self) -> bool:
        return not self.causal

    def body(self, variant: BodyVariant = BodyVariant.BATCHED) -> onnx.FunctionProto:
        """The same function in each order."""
        return super().body()

    def by_pytorch(self, states: Sequence[torch.Tensor], feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of its fused attention with a dense mask."""
        tokens, real = states[0].shape[1], feeds["key_mask"]
        seen = real[:, None, None].expand(-1, 1, tokens, tokens)
        if self.causal:
            seen = seen.tril() & real[:, None, :, None]
        of_heads = (state.transpose(1, 2) for state in states)
        attended = torch.nn.functional.scaled_dot_product_attention(
            *of_heads, attn_mask=seen, scale=self.head_dim**-0.5, enable_gqa=self.is_grouped
        )
        return attended.masked_fill(~seen.any(-1, keepdim=True), 0).transpose(1, 2)


NODES = (Dense(heads=4), Dense(heads=4, kv_heads=2, causal=1))


def _cases() -> list[Any]:
    """Texts of lengths around tiles under every padding, alone and in batches."""
    cases: list[Any] = []
    forms = itertools.cycle((Dense(heads=1), Dense(heads=1, causal=1), NODES[1], Dense(heads=2, kv_heads=1)))
    lengths = (1, 15, 16, 17, 31, 32, 33, 47, 64, 65)
    for (tokens, padding), layer in zip(itertools.product(lengths, PADDINGS), forms, strict=False):
        kinds, name = token_kinds(padding, tokens, batch=1 if tokens % 2 else 3), (tokens, "padding", padding)
        cases.append(kernel_case(*name, layer=layer, kinds=torch.from_numpy(kinds), is_nightly=tokens in (15, 31, 47)))
    ends = torch.from_numpy(token_kinds("none", 97))
    ends[0, :33], ends[0, 80:], ends[1, :17] = 0, 0, 0
    for head_dim, dtype, causal in itertools.product(WINDOW_HEAD_DIMS, KERNEL_DTYPES, (0, 1)):
        layer = Dense(heads=1, head_dim=head_dim, dtype=dtype, causal=causal)
        is_nightly = (head_dim, dtype, causal) not in ((80, "float16", 1), (128, "float16", 0))
        case = {"layer": layer, "kinds": ends, "block_config": block_config_of_gpu(layer), "is_nightly": is_nightly}
        cases.append(kernel_case("heads of", head_dim, dtype, "causal" * causal, **case))
    cases.append(kernel_case("scores far beyond exp", layer=NODES[1], kinds=ends, size=1000))
    # Longer than the part of the mask that is read at a time.
    long = torch.from_numpy(token_kinds("right", 1030, batch=1))
    for causal in (0, 1):
        layer = Dense(heads=1, causal=causal)
        cases.append(
            kernel_case("long", "causal" * causal, layer=layer, kinds=long, block_config=block_config_of_gpu(layer))
        )
    return cases


KERNELS = KernelDescription(
    block_config=BlockConfig(block_m=32, block_n=16, num_warps=4, num_stages=2, block_d=32),
    cases=_cases(),
    # The third block of 32 queries is the first that sees token 64.
    not_loaded=(Dense(heads=1, causal=1), 112, 64, 64, 64),
    fitting=Dense(heads=12, head_dim=64),
    refused=[({"causal": 2}, "causal is 2; it must be 0 or 1")],
)
