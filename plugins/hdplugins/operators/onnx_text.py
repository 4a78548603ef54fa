"""What the function bodies of operators share: the orders of their blocks, and nodes written as ONNX text."""

from __future__ import annotations

__all__ = ["BlockOrder", "nodes_of"]

from collections.abc import Sequence
from enum import Enum

import onnx
import onnx.parser

from hdplugins.constants import ONNX_DOMAIN, ONNX_OPSET


class BlockOrder(str, Enum):
    """How the blocks of a text are computed: all in one batch, or one after another in a Scan."""

    PARALLEL = "parallel"
    SEQUENTIAL = "sequential"


def nodes_of(text: str, *, inputs: Sequence[str], attributes: Sequence[str]) -> list[onnx.NodeProto]:
    """The nodes of a part of a function's body.

    Args:
        text: nodes in ONNX's textual syntax; what they read may be made by other parts.
        inputs: names of the function's inputs.
        attributes: names of its attributes.
    """
    signature = f"part <{', '.join(attributes)}> ({', '.join(inputs)}) => (none)"
    opening = f'<domain: "{ONNX_DOMAIN}", opset_import: ["" : {ONNX_OPSET}]>'
    return list(onnx.parser.parse_function(f"{opening} {signature} {{ {text} }}").node)
