"""The weights that nodes of a graph read, also where half-precision weights are upcast."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir


def initializer_of(value: onnx_ir.Value | None) -> onnx_ir.Value | None:
    """The initializer behind a value and its casts; None for other values."""
    if value is None:
        return None
    if value.is_initializer():
        return value
    producer = value.producer()
    return initializer_of(producer.inputs[0]) if producer is not None and producer.op_type == "Cast" else None
