"""A float graph whose products can each be made int8 at a run: many choices of them are tried in one session."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hdexport.quantize.calibration import CalibratedProduct
from hdexport.quantize.products import WeightProduct, weight_products
from hdexport.verify.single_texts import single_text_runner
from hdruntime.arrays import FloatArray, IntArray
from hdruntime.bundle.reader import Bundle

if TYPE_CHECKING:
    import onnx_ir


class SwitchedGraph:
    """A bundle's float graph in ONNX Runtime; each product of the graph is float, or computes as its int8 form would.

    Rounded values are multiplied in float32: which products are left float must not depend on the kernels of the
    processor on which a bundle is built.

    Args:
        bundle: in whose files the weights are.
        model: its float graph; it is changed.
        products: name of a weight -> its product, rounded.
    """

    def __init__(self, bundle: Bundle, model: onnx_ir.Model, products: Mapping[str, CalibratedProduct]) -> None:
        self._names = [spec.name for spec in bundle.manifest.answers]
        self._switches = {name: _add_switch(model, name) for name in products}
        for product in weight_products(model):
            if product.weight in products:
                _replace(model, product, products[product.weight], self._switches[product.weight])
        self._run = single_text_runner(bundle, model)

    def answers(self, used: Collection[str], texts: Sequence[IntArray]) -> list[list[FloatArray]]:
        """All answers to each text, without the batch axis.

        Args:
            used: the weights whose products are int8.
            texts: ids, [tokens] each.
        """
        switches = {str(value.name): np.array(name in used) for name, value in self._switches.items()}
        found = []
        for text in texts:
            outputs = self._run(self._names, text, switches)
            found.append([outputs[name][0] for name in self._names])
        return found


def _add_switch(model: onnx_ir.Model, name: str) -> onnx_ir.Value:
    import onnx_ir as ir

    switch = ir.Value(name=f"{name}.is_int8", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    model.graph.inputs.append(switch)
    return switch


def _replace(model: onnx_ir.Model, product: WeightProduct, rounded: CalibratedProduct, switch: onnx_ir.Value) -> None:
    import onnx_ir as ir

    node, activation = product.node, rounded.activation
    result = node.outputs[0]

    def constant(name: str, array: Any) -> onnx_ir.Value:
        tensor = ir.tensor(np.asarray(array), name=f"{result.name}.{name}")
        value = ir.Value(name=tensor.name, const_value=tensor)
        model.graph.initializers[str(value.name)] = value
        return value

    source = product.source
    nodes = []
    if activation.split is not None:
        nodes.append(ir.node("Gather", [source, constant("sources", activation.split.sources)], {"axis": -1}))
        source = nodes[-1].outputs[0]
    nodes.append(ir.node("Mul", [source, constant("factor", activation.factor)]))
    nodes.append(ir.node("Add", [nodes[-1].outputs[0], constant("offset", activation.offset)]))
    nodes.append(
        ir.node("QuantizeLinear", [*nodes[-1].outputs, constant("one", np.float32(1)), constant("zero", np.uint8(0))])
    )
    nodes.append(ir.node("Cast", nodes[-1].outputs, {"to": ir.DataType.FLOAT}))
    weight = rounded.weight.values.astype(np.float32) * rounded.weight.scale
    nodes.append(ir.node("MatMul", [nodes[-1].outputs[0], constant("weight", weight)]))
    nodes.append(ir.node("Add", [nodes[-1].outputs[0], constant("bias", rounded.weight.bias)]))
    exact = ir.node("MatMul", list(node.inputs))
    branches = {
        "then_branch": _branch(f"{result.name}.int8", nodes),
        "else_branch": _branch(f"{result.name}.float", [exact]),
    }
    switched = ir.node("If", [switch], branches)
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], [switched], node.outputs, switched.outputs)


def _branch(name: str, nodes: Sequence[onnx_ir.Node]) -> onnx_ir.Graph:
    import onnx_ir as ir

    for number, node in enumerate(nodes):
        node.outputs[0].name = f"{name}_{number}"
    output = nodes[-1].outputs[0]
    output.dtype = ir.DataType.FLOAT
    return ir.Graph(inputs=[], outputs=[output], nodes=nodes, name=name)
