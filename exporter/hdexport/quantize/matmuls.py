"""The matmuls with weights that become int8, in a graph of any lowering."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import onnx_ir

from hdexport.graph.weights import initializer_of
from hdruntime.arrays import AnyArray, FloatArray

_OF_A_LAYER = re.compile(r"\.\d+\.")
"""The number of a layer in a weight's name. Heads have none, nor does ``Gemm`` occur elsewhere: they read one vector of
a text, and their result is the answer."""

_BEFORE_CHOICE = frozenset({"Add", "Cast", "Reshape", "Sigmoid", "Softmax"})
"""Operators between a router's product and the choice of experts."""


@dataclass(frozen=True, kw_only=True)
class WeightMatMul:
    """A ``MatMul`` of an activation [..., channels] and a weight [channels, outputs], in the main graph or in a body.
    The weight is the initializer's name, the same in all lowerings."""

    node: onnx_ir.Node
    weight: str

    @property
    def source(self) -> onnx_ir.Value:
        """The activation."""
        source = self.node.inputs[0]
        assert source is not None
        return source


def weight_matmuls(model: onnx_ir.Model) -> list[WeightMatMul]:
    """The matmuls with weights of a model's layers, bodies of loops and branches included, in the order of the graph;
    without heads, matmuls of two constants, and those whose results choose experts: near a tie, a rounded weight
    changes an expert's whole output."""
    matmuls = []
    for node in model.graph.all_nodes():
        if node.op_type != "MatMul" or node.domain not in ("", "ai.onnx"):
            continue
        source, weight = node.inputs
        stored = initializer_of(weight)
        if stored is None or initializer_of(source) is not None or stored.shape is None or len(stored.shape) != 2:
            continue
        if _OF_A_LAYER.search(str(stored.name)) and not _leads_to_choice(node.outputs[0]):
            matmuls.append(WeightMatMul(node=node, weight=str(stored.name)))
    return matmuls


def _leads_to_choice(value: onnx_ir.Value) -> bool:
    """Whether the largest of a value's elements, or of elements computed from them alone, are chosen."""
    return any(
        use.node.op_type == "TopK" or (use.node.op_type in _BEFORE_CHOICE and _leads_to_choice(use.node.outputs[0]))
        for use in value.uses()
    )


def constant_array(value: onnx_ir.Value | None) -> FloatArray | None:
    """The numbers of an initializer in float32, also of one in half precision that is cast; None for other values."""
    stored = initializer_of(value)
    if stored is None:
        return None
    assert stored.const_value is not None
    array: AnyArray = stored.const_value.numpy()
    return array.astype(np.float32)
