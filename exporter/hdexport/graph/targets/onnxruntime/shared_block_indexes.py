"""Share one block index among all layers whose compiled kernels would compute equal ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdexport.lowering.kernel_nodes import give_block_index, kernel_nodes, nodes_of_equal_block_indexes
from hdplugins.attention.plugin_spec import BLOCK_INDEX, BlockIndexUse

if TYPE_CHECKING:
    import onnx_ir

_NO_BLOCK_INDEX = "no_block_index"


def share_block_indexes(model: onnx_ir.Model) -> int:
    """Share equal block indexes in place: the first node outputs the index, the others take it; returns their number.

    Without kernels the graph computes the same: the body of a node that gives a block index gives an empty one, which
    the others' bodies do not read.
    """
    taking = 0
    for first, *others in nodes_of_equal_block_indexes(kernel_nodes(model)):
        give_block_index(first, others)
        for node in (first, *others):
            _use_block_index(model, node, BlockIndexUse.OUTPUT if node is first else BlockIndexUse.INPUT)
        taking += len(others)
    return taking


def _use_block_index(model: onnx_ir.Model, node: onnx_ir.Node, use: BlockIndexUse) -> None:
    """Give a node the type of those that use a block index so, and the type a body."""
    import onnx_ir as ir

    body = model.functions[node.op_identifier()].clone()
    node.op_type = body.name = node.op_type + use.suffix
    if use is BlockIndexUse.INPUT:
        body.inputs.append(ir.Value(name=BLOCK_INDEX))
    else:
        nothing = ir.tensor([], ir.DataType.INT32)
        constant = ir.node("Constant", [], {"value": nothing}, outputs=[ir.Value(name=_NO_BLOCK_INDEX)])
        body.append(constant)
        body.outputs.append(constant.outputs[0])
    model.functions[node.op_identifier()] = body
