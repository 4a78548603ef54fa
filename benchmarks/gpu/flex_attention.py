"""PyTorch's FlexAttention, which kernels are timed against."""

from __future__ import annotations

__all__ = ["flex_attention_on"]

from typing import Any

_MOST_COMPILED_SHAPES = 64


def flex_attention_on(device: str) -> Any:
    """PyTorch's `flex_attention`, compiled for every shape: from the ninth on PyTorch would run it uncompiled.

    A rehearsal does without the compiler, which takes half a minute a shape there.
    """
    import torch._dynamo
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = _MOST_COMPILED_SHAPES
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention
