"""The nodes of a graph that our operators own."""

from __future__ import annotations

__all__ = ["operator_nodes"]

from typing import TYPE_CHECKING

from hdplugins import ONNX_DOMAIN

if TYPE_CHECKING:
    import onnx_ir


def operator_nodes(model: onnx_ir.Model, op_type: str | None = None) -> list[onnx_ir.Node]:
    """The nodes of the domain ``hdexport``, in graph order.

    Args:
        model: the model to look into; bodies of functions are not searched.
        op_type: only nodes of this operator.
    """
    return [node for node in model.graph if node.domain == ONNX_DOMAIN and (op_type is None or node.op_type == op_type)]
