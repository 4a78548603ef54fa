"""Share one block index among all layers whose compiled kernels would compute equal block indexes."""

from __future__ import annotations

import logging

import onnx_ir as ir

from hdexport.lowering.kernel_nodes import give_block_index, kernel_nodes, nodes_of_equal_block_indexes
from hdplugins.attention.plugin_spec import BLOCK_INDEX, BlockIndexUse
from hdplugins.op_builder import OpBuilder

logger = logging.getLogger(__name__)

_NO_BLOCK_INDEX = "no_block_index"


class ShareBlockIndexes(ir.passes.InPlacePass):
    """Share equal block indexes: the first node outputs the block index, the other nodes take it as an input.

    Without kernels the outputs of the graph are equal: the body of a node that outputs a block index outputs an empty
    one, which the other bodies do not read.

    Attributes:
        shared: number of nodes that take a block index.
    """

    def __init__(self) -> None:
        self.shared = 0

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        for first, *others in nodes_of_equal_block_indexes(kernel_nodes(model)):
            give_block_index(first, others)
            for node in (first, *others):
                _use_block_index(model, node, BlockIndexUse.OUTPUT if node is first else BlockIndexUse.INPUT)
            self.shared += len(others)
        if self.shared:
            logger.info("%d nodes take the block index of another node", self.shared)
        return ir.passes.PassResult(model, modified=self.shared > 0)


def _use_block_index(model: ir.Model, node: ir.Node, use: BlockIndexUse) -> None:
    """Give a node the type of nodes that use a block index in this way, and give the type a body."""
    body = model.functions[node.op_identifier()].clone()
    node.op_type = body.name = node.op_type + use.suffix
    if use is BlockIndexUse.INPUT:
        body.inputs.append(ir.Value(name=BLOCK_INDEX))
    else:
        op = OpBuilder.append(body.graph)
        body.outputs.append(op.Constant(value=ir.tensor([], ir.DataType.INT32), _outputs=[_NO_BLOCK_INDEX]))
    model.functions[node.op_identifier()] = body
