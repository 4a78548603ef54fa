"""The modules of PyTorch's model that nodes of a graph came from, by the names of the weights that they read."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from hdplugins import ONNX_DOMAIN

if TYPE_CHECKING:
    import onnx_ir

_TRANSPOSED = ".transposed"

_WRAPPER = "model."
"""Attribute of `hdexport.model.graph_module.GraphModule` that holds the model; no checkpoint's names begin with it."""

_LINEAR = ("Gemm", "MatMul")


def name_transposed_weights(model: onnx_ir.Model) -> int:
    """Name transpositions of weights after them, in place; returns their number.

    Folding them makes weights of them that keep these names; without, a linear layer's would be ``val_20``.
    """
    weights = model.graph.initializers
    nodes = [node for node in model.graph if node.op_type == "Transpose" and node.inputs[0] in weights.values()]
    names: set[str] = set()
    for node in nodes:
        assert node.inputs[0] is not None
        name = f"{node.inputs[0].name}{_TRANSPOSED}"
        if name in names:
            # A weight that several layers share.
            name = f"{name}.{len(names)}"
        names.add(name)
        node.outputs[0].name = name
    return len(nodes)


def module_names(graph: onnx_ir.Graph) -> dict[onnx_ir.Node, str]:
    """The path of each node's module, such as ``encoder.layer.3.intermediate.dense``, in a graph with its nodes in
    order.

    A node without weights gets the module of the value that it reads last, because its values come from there; an
    attention the common part of its inputs' modules. The path is empty where neither says, and for linear layers whose
    weight has no name of PyTorch's, as in bundles of older versions.
    """
    names: dict[onnx_ir.Node, str] = {}
    places: dict[onnx_ir.Node, int] = {}
    for place, node in enumerate(graph):
        places[node] = place
        weights = [value.name for value in node.inputs if value is not None and value.is_initializer() and value.name]
        own = [
            weight.partition(_TRANSPOSED)[0].rpartition(".")[0].removeprefix(_WRAPPER)
            for weight in weights
            if "." in weight
        ]
        producers = {value.producer() for value in node.inputs if value is not None}
        sources = sorted(
            (source for source in producers if source is not None and names[source]), key=places.__getitem__
        )
        if own:
            names[node] = own[0]
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
