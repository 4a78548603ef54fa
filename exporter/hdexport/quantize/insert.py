"""Puts int8 matmuls into a lowered graph: rounded activations, stored int8 weights, and a bias that corrects both.

The graph gets the standard's QuantizeLinear and DequantizeLinear, of which runtimes make int8 matmuls. An activation
has a scale and zero point for each channel: a multiplication and an addition before QuantizeLinear, which gets neither.
OpenVINO takes none of the last axis there, and fuses both with the node before; ONNX Runtime takes them and rounds
value by value (1.31.1, an Intel Xeon with VNNI, one thread: 146 of 241 ms of the sample model at 512 tokens, against 4
ms for all three). DequantizeLinear has neither, too: the weights hold them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from hdexport.quantize.calibration import CalibratedMatMul
from hdexport.quantize.matmuls import WeightMatMul, constant_array, weight_matmuls
from hdexport.quantize.rounding import ActivationScale
from hdexport.quantize.splitting import Split, splittable_activation
from hdplugins.op_builder import OpBuilder
from hdruntime.arrays import FloatArray


def quantize_matmuls(
    model: ir.Model, rounded: Mapping[str, CalibratedMatMul], values: Mapping[str, ir.TensorProtocol]
) -> list[str]:
    """Replaces the matmuls of a lowered graph with those of `rounded`, in place; `values` has the stored int8 weights,
    [channels, outputs], by name. The result is the names of the replaced matmuls' weights, one per matmul."""
    matmuls = [matmul for matmul in weight_matmuls(model) if matmul.weight in rounded]
    insertion = _Insertion(model)
    for matmul in matmuls:
        insertion.replace(matmul, rounded[matmul.weight], values[matmul.weight])
    RemoveUnusedNodesPass()(model)
    return [matmul.weight for matmul in matmuls]


class _Insertion:
    def __init__(self, model: ir.Model) -> None:
        self._graph, self._numbers = model.graph, itertools.count()
        self._activations: dict[tuple[ir.Value, int, int], ir.Value] = {}
        self._one = self._constant("int8.one", np.float32(1))
        self._zero = self._constant("int8.zero", np.uint8(0))

    def replace(self, matmul: WeightMatMul, rounded: CalibratedMatMul, values: ir.TensorProtocol) -> None:
        node, activation = matmul.node, rounded.activation
        key = (matmul.source, id(node.graph), id(activation))
        if key not in self._activations:
            if activation.split is not None:
                self._split_channels(matmul, activation.split)
            self._activations[key] = self._rounded(node, matmul.source, activation)
        node.replace_input_with(0, self._activations[key])
        stored = self._initializer(f"{matmul.weight}.int8", values)
        scale = self._constant(f"{matmul.weight}.int8_scale", rounded.weight.scale)
        weight = self._before(node).DequantizeLinear(stored, scale, axis=1)
        weight.dtype, weight.shape = ir.DataType.FLOAT, values.shape
        node.replace_input_with(1, weight)
        self._add_bias(node, f"{matmul.weight}.int8_bias", rounded.weight.bias)

    def _split_channels(self, matmul: WeightMatMul, split: Split) -> None:
        """Repeats the channels of a matmul's activation as often as they have parts; runtimes compute the constants
        when they load."""
        activation = splittable_activation(matmul)
        assert activation is not None, f"{matmul.weight} was split in another lowering"
        order = self._constant(f"{matmul.weight}.int8_order", split.sources)
        for node, index in activation.constants:
            read = node.inputs[index]
            assert read is not None
            producer = read.producer()
            if producer is not None and producer.op_type == "DequantizeLinear":
                for number in (0, 1):
                    producer.replace_input_with(number, self._repeated(producer, producer.inputs[number], order))
                self._set_channels(read, split)
            else:
                node.replace_input_with(index, self._repeated(node, read, order))
        for value in activation.values:
            self._set_channels(value, split)

    def _repeated(self, node: ir.Node, constant: ir.Value, order: ir.Value) -> ir.Value:
        repeated = self._before(node).Gather(constant, order, axis=-1)
        repeated.dtype = constant.dtype
        return repeated

    def _set_channels(self, value: ir.Value, split: Split) -> None:
        if value.shape is not None:
            value.shape = ir.Shape([*value.shape[:-1], len(split.sources)])

    def _rounded(self, node: ir.Node, source: ir.Value, activation: ActivationScale) -> ir.Value:
        name = f"{source.name}.int8_{len(self._activations)}"
        factor = self._constant(f"{name}_factor", activation.factor)
        offset = self._constant(f"{name}_offset", activation.offset)
        op = self._before(node)
        scaled = self._like(source, op.Mul(source, factor))
        shifted = self._like(source, op.Add(scaled, offset))
        levels = op.QuantizeLinear(shifted, self._one, self._zero)
        return self._like(source, op.DequantizeLinear(levels, self._one, self._zero))

    def _add_bias(self, node: ir.Node, name: str, bias: FloatArray) -> None:
        """Changes the bias that is added to a matmul, or adds one."""
        result = node.outputs[0]
        users = list(result.uses())
        if len(users) == 1 and users[0].node.op_type == "Add":
            add, index = users[0].node, 1 - users[0].idx
            present = constant_array(add.inputs[index])
            if present is not None and present.shape == bias.shape:
                add.replace_input_with(index, self._constant(f"{name}_{add.name}", present + bias))
                return
        added = self._like(result, ir.Value(name=self._name()))
        ir.convenience.replace_all_uses_with(result, added, replace_graph_outputs=True)
        OpBuilder.after(node).Add(result, self._constant(name, bias), _outputs=[added])

    def _like(self, value: ir.Value, made: ir.Value) -> ir.Value:
        made.dtype, made.shape = value.dtype, value.shape
        return made

    def _before(self, node: ir.Node) -> OpBuilder:
        return OpBuilder.before(node, name_value=self._name)

    def _name(self, _: str = "") -> str:
        # Names are unique across graphs and the bodies in them.
        return f"int8.value_{next(self._numbers)}"

    def _constant(self, name: str, array: Any) -> ir.Value:
        return self._initializer(name, ir.tensor(np.asarray(array), name=name))

    def _initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """An initializer of the main graph, which bodies read as well; one of that name is there once."""
        if name not in self._graph.initializers:
            value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
            self._graph.initializers[name] = value
        return self._graph.initializers[name]
