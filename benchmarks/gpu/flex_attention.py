"""PyTorch's FlexAttention, which kernels are timed against."""

from __future__ import annotations

__all__ = ["flex_attention_on", "has_flash_backend"]

import functools
import importlib.util
from typing import Any

_MOST_COMPILED_SHAPES = 64


def has_flash_backend() -> bool:
    """Whether FlexAttention's backend ``FLASH`` is here: ``pip install flash-attn-4``, for Hopper and newer GPUs."""
    return (
        importlib.util.find_spec("flash_attn") is not None and importlib.util.find_spec("flash_attn.cute") is not None
    )


def flex_attention_on(device: str, *, backend: str = "AUTO") -> Any:
    """PyTorch's `flex_attention`, compiled for every shape: from the ninth on PyTorch would run it uncompiled.

    A rehearsal does without the compiler, which takes half a minute a shape there.

    Args:
        device: ``cuda`` or ``cpu``.
        backend: PyTorch's name of what computes it.
    """
    import torch._dynamo
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = _MOST_COMPILED_SHAPES
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if device == "cpu":
        return flex_attention
    return functools.partial(torch.compile(flex_attention, dynamic=False), kernel_options={"BACKEND": backend})
