"""Nodes of the operators that TensorRT runs by hdexport's plugins; the nodes have no function body."""

from __future__ import annotations

import logging

import onnx_ir as ir

from hdexport.lowering.kernel_nodes import (
    give_block_index,
    kernel_nodes,
    nodes_of_equal_block_indexes,
    shapes_of_inputs,
)
from hdexport.lowering.nodes import attributes_of, operator_nodes, operator_of
from hdplugins import ONNX_DOMAIN
from hdplugins.attention.plugin_spec import BLOCK_INDEX_USE, BlockIndexUse, plugin_spec_of
from hdruntime.errors import ExportError, Setting

logger = logging.getLogger(__name__)

_NAMESPACE, _VERSION = "plugin_namespace", "plugin_version"
"""Attributes by which TensorRT's parser looks a plugin up."""

_MOST_INT32 = 2**31 - 1


class UsePlugins(ir.passes.InPlacePass):
    """Turn every operator with a plugin into a node of the plugin.

    1. The functions of the operators are removed, and nodes get the operator's name: TensorRT's parser prefers a
       function to a plugin, and the function's name to the operator's name.
    2. Nodes with equal block indexes share the block index of the first node.

    `dtype` is the dtype of the weights. An ExportError says that a node has no kernel.
    """

    def __init__(self, *, dtype: str) -> None:
        self._dtype = dtype

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Change the nodes."""
        nodes = [node for node in kernel_nodes(model) if plugin_spec_of(operator_of(node)).IS_PLUGIN]
        for node in nodes:  # 1
            _check(node, self._dtype)
            operator = operator_of(node)
            model.functions.pop(node.op_identifier(), None)
            node.op_type = operator.name
            node.attributes[_NAMESPACE] = ir.AttrString(_NAMESPACE, ONNX_DOMAIN)
            node.attributes[_VERSION] = ir.AttrString(_VERSION, str(operator.version))
        for first, *others in nodes_of_equal_block_indexes(nodes):  # 2
            give_block_index(first, others)
            for node in (first, *others):
                use = BlockIndexUse.OUTPUT if node is first else BlockIndexUse.INPUT
                node.attributes[BLOCK_INDEX_USE] = ir.AttrInt64(BLOCK_INDEX_USE, int(use))
        if nodes:
            logger.info("%d attentions are nodes of hdexport's plugins", len(nodes))
        return ir.passes.PassResult(model, modified=bool(nodes))


def plugin_nodes(model: ir.Model) -> list[ir.Node]:
    """The plugin nodes of a lowered graph, in graph order."""
    return [node for node in operator_nodes(model) if _NAMESPACE in node.attributes]


def own_shapes(node: ir.Node) -> list[list[int]]:
    """The shapes of a plugin's inputs, without a block index behind them; see `shapes_of_inputs`."""
    return shapes_of_inputs(node, node.inputs[:-1] if block_index_use_of(node) is BlockIndexUse.INPUT else node.inputs)


def block_index_use_of(node: ir.Node) -> BlockIndexUse:
    """Where a plugin's node finds its block index."""
    attribute = node.attributes.get(BLOCK_INDEX_USE)
    return BlockIndexUse.PRIVATE if attribute is None else BlockIndexUse(attribute.as_int())


def _check(node: ir.Node, dtype: str) -> None:
    operator, attributes = operator_of(node), attributes_of(node)
    try:
        for name, value in attributes.items():
            # TensorRT's parser would truncate them to 32 bits without an error.
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int) and number > _MOST_INT32:
                    raise ValueError(f"{name} is {number}; TensorRT reads 32 bits, {_MOST_INT32} at most.")
        spec = plugin_spec_of(operator)
        if dtype not in spec.DTYPES:
            raise ValueError(f"The kernel has no {dtype}; it has {', '.join(spec.DTYPES)}.")
        spec.check(own_shapes(node), attributes)
    except ValueError as error:
        raise ExportError(
            f"hdexport's TensorRT plugin cannot run {operator.name} here. {error}",
            hint=(
                "Build with ",
                Setting("attention_impl", "native", command="build"),
                ": TensorRT runs the operator by native layers.",
            ),
        ) from error
