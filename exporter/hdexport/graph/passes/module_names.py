"""The PyTorch modules that nodes of a graph come from, found by the names of the weights that the nodes read."""

from __future__ import annotations

import itertools
import logging

import onnx_ir as ir

from hdexport.graph.weights import initializer_of
from hdplugins import ONNX_DOMAIN

logger = logging.getLogger(__name__)

_TRANSPOSED = ".transposed"

_WRAPPER = "model."
"""Attribute of `hdexport.model.graph_module.GraphModule` that holds the model; no checkpoint's names begin with it."""

_LINEAR = ("Gemm", "MatMul")


class NameTransposedWeights(ir.passes.InPlacePass):
    """Name transposes of weights after the weights.

    Constant folding turns the transposes into weights with these names; otherwise a linear layer's weight would be
    ``val_20``.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        weights = set(model.graph.initializers.values())
        nodes = [node for node in model.graph if node.op_type == "Transpose" and node.inputs[0] in weights]
        names: set[str] = set()
        for node in nodes:
            assert node.inputs[0] is not None
            name = f"{node.inputs[0].name}{_TRANSPOSED}"
            if name in names:
                # Several layers share the weight.
                name = f"{name}.{len(names)}"
            names.add(name)
            node.outputs[0].name = name
        logger.debug("%d transposed weights are named", len(nodes))
        return ir.passes.PassResult(model, modified=bool(nodes))


def module_names(graph: ir.Graph) -> dict[ir.Node, str]:
    """The path of each node's module, such as ``encoder.layer.3.intermediate.dense``, in a graph with its nodes in
    order.

    A node without weights gets the module of the value that it reads last, because its values come from there; an
    attention the common part of its inputs' modules. The path is empty where neither says, and for linear layers whose
    weight has no name of PyTorch's, as in bundles of older versions.
    """
    names: dict[ir.Node, str] = {}
    indices: dict[ir.Node, int] = {}
    for index, node in enumerate(graph):
        indices[node] = index
        weights = [weight.name for weight in map(initializer_of, node.inputs) if weight is not None and weight.name]
        of_weights = [
            weight.partition(_TRANSPOSED)[0].rpartition(".")[0].removeprefix(_WRAPPER)
            for weight in weights
            if "." in weight
        ]
        producers = {value.producer() for value in node.inputs if value is not None}
        sources = sorted(
            (source for source in producers if source is not None and names[source]), key=indices.__getitem__
        )
        if of_weights:
            names[node] = of_weights[0]
        elif not sources or (node.op_type in _LINEAR and weights):
            names[node] = ""
        elif node.domain == ONNX_DOMAIN:
            names[node] = _common_module([names[source] for source in sources])
        else:
            names[node] = names[sources[-1]]
    return names


def _common_module(names: list[str]) -> str:
    parts = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(of_all[0] for of_all in itertools.takewhile(lambda of_all: len(set(of_all)) == 1, parts))
