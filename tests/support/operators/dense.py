"""The operator DenseAttention as tests need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx

from hdplugins import OPERATORS
from hdplugins.attention.operator import BlockOrder
from support.attention_layers import Layer


@dataclass(frozen=True, kw_only=True)
class Dense(Layer):
    """A node DenseAttention."""

    operator = OPERATORS["DenseAttention"]
    causal: int = 0

    @property
    def attributes(self) -> dict[str, Any]:
        return {"causal": self.causal}

    def body(self, order: BlockOrder = BlockOrder.PARALLEL) -> onnx.FunctionProto:
        """The same function in each order."""
        return super().body()


NODES = (Dense(heads=4), Dense(heads=4, kv_heads=2, causal=1))
