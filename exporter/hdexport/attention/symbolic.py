"""Nodes of our operators in a graph that is being exported."""

from __future__ import annotations

__all__ = ["operator_node"]

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION


def operator_node(name: str, inputs: Sequence[torch.Tensor], attributes: Mapping[str, Any]) -> torch.Tensor:
    """A node of the operator of that name; its output has the shape and type of the first input."""
    return torch.onnx.ops.symbolic(
        f"{ONNX_DOMAIN}::{name}",
        inputs,
        attrs=dict(attributes),
        dtype=inputs[0].dtype,
        shape=inputs[0].shape,
        version=ONNX_DOMAIN_VERSION,
    )
