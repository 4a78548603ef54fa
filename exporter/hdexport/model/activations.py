"""Activations as one operator, where the library's code makes many of them."""

from __future__ import annotations

import torch
from transformers.activations import FastGELUActivation, NewGELUActivation


def fuse_gelu(model: torch.nn.Module) -> None:
    """Make the GELU of a tanh, which the library writes out in powers and products, ONNX's ``Gelu``, in place.

    The library's code takes eight passes over the widest states, between the layers; ``Gelu`` takes one.
    """
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, (FastGELUActivation, NewGELUActivation)):
                setattr(module, name, torch.nn.GELU(approximate="tanh"))
