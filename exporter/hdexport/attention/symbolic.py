"""Nodes of our operators in a graph that is being exported, and their definitions elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION, OPERATORS


def operator_node(name: str, inputs: Sequence[torch.Tensor], attributes: Mapping[str, Any]) -> torch.Tensor:
    """One node of the operator of that name while a graph is exported, the operator's definition otherwise.

    The result has the shape and type of the first input.
    """
    if not torch.compiler.is_exporting():
        defined: torch.Tensor = OPERATORS[name].definition(*inputs, **attributes)
        return defined
    return torch.onnx.ops.symbolic(
        f"{ONNX_DOMAIN}::{name}",
        inputs,
        attrs=dict(attributes),
        dtype=inputs[0].dtype,
        shape=inputs[0].shape,
        version=ONNX_DOMAIN_VERSION,
    )
