"""Functions of standard operators that lowerings write as ONNX text; they are inlined in the end."""

from __future__ import annotations

__all__ = ["OPSET", "add_function"]

from typing import TYPE_CHECKING

from hdplugins import ONNX_DOMAIN

if TYPE_CHECKING:
    import onnx_ir

OPSET = 24
"""Of the operator ``Attention``, which OpenVINO fuses."""


def add_function(model: onnx_ir.Model, text: str) -> None:
    """Give a graph a function of that opset.

    Args:
        model: the graph; its other functions may be of another opset until all are inlined.
        text: name, attributes, inputs, outputs and body, in ONNX's textual syntax.
    """
    import onnx
    import onnx_ir as ir

    header = f'<domain: "{ONNX_DOMAIN}", opset_import: ["" : {OPSET}, "{ONNX_DOMAIN}" : 1]>'
    function = ir.serde.deserialize_function(onnx.parser.parse_function(header + text))
    model.functions[function.identifier()] = function
