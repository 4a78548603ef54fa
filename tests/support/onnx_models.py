"""ONNX models written as text."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import numpy_helper


def parsed_model(
    inputs: Mapping[str, str], outputs: Mapping[str, str], nodes: str, constants: Mapping[str, object] | None = None
) -> onnx.ModelProto:
    """A checked model of opset 18.

    Args:
        inputs: name -> type and shape, as `onnx.parser` reads them: ``float[batch, 4]``.
        outputs: likewise.
        nodes: one ``output = Operator <attributes> (inputs)`` per line.
        constants: name -> value.
    """
    signature = [", ".join(f"{kind} {name}" for name, kind in values.items()) for values in (inputs, outputs)]
    header = '<ir_version: 10, opset_import: ["" : 18]>'
    model = onnx.parser.parse_model(f"{header} model ({signature[0]}) => ({signature[1]}) {{ {nodes} }}")
    for name, value in (constants or {}).items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    onnx.checker.check_model(model)
    return model
