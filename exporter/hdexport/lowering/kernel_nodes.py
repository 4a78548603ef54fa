"""The nodes of a graph that compiled kernels can compute: by plugins in TensorRT, by operators in ONNX Runtime."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hdexport.lowering.nodes import attributes_of, operator_nodes, operator_of
from hdexport.lowering.relative_position_bias import LONG_SEQUENCES, has_shared_bias
from hdplugins.attention.plugin_spec import BLOCK_INDEX, PLUGIN, plugin_spec_of, sizes
from hdruntime.bundle.manifest import KernelNode
from hdruntime.errors import ExportError, Setting

if TYPE_CHECKING:
    import onnx_ir

logger = logging.getLogger(__name__)


def kernel_nodes(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    """The nodes whose operators have kernels, in graph order."""
    return [node for node in operator_nodes(model) if operator_of(node).has_implementation(PLUGIN)]


def shapes_of_inputs(node: onnx_ir.Node, inputs: Sequence[onnx_ir.Value | None] | None = None) -> list[list[int]]:
    """The shape of each input of a node, with 1 for dynamic axes; `inputs` are some of the inputs, None for all."""
    shapes = []
    for value in node.inputs if inputs is None else inputs:
        if value is None or value.shape is None:
            raise ExportError(
                f"The graph does not state the shapes that {node.op_type} {node.name} takes, and a kernel is chosen by "
                "them.",
                hint=("Build with ", Setting("attention_impl", "native", command="build"), ", and report the model."),
            )
        shapes.append([axis if isinstance(axis, int) else 1 for axis in value.shape])
    return shapes


def nodes_of_equal_block_indexes(nodes: Sequence[onnx_ir.Node]) -> list[list[onnx_ir.Node]]:
    """The nodes whose block indexes are equal, two or more at a time, in graph order.

    A block index depends on the mask, on few attributes, and on the size of a head, which decides the steps of keys
    that a block index is for. The layers of a graph mostly have equal block indexes.
    """
    alike: dict[Any, list[onnx_ir.Node]] = {}
    for node in nodes:
        operator, attributes = operator_of(node), attributes_of(node)
        spec, shapes = plugin_spec_of(operator), shapes_of_inputs(node)
        if spec.block_index_size(shapes, attributes) is not None:
            by_name = dict(zip(operator.inputs, node.inputs, strict=False))
            inputs = [value for name, value in by_name.items() if name in spec.block_index_inputs]
            decided = [attributes[name] for name in spec.BLOCK_INDEX_ATTRIBUTES]
            key = (operator.name, node.graph, sizes(shapes[0]).head_dim, *inputs, *decided)
            alike.setdefault(key, []).append(node)
    return [group for group in alike.values() if len(group) > 1]


def give_block_index(first: onnx_ir.Node, others: Sequence[onnx_ir.Node]) -> None:
    """Give a node a second output, its block index, which becomes the last input of the others."""
    import onnx_ir as ir

    first.resize_outputs(2)
    result, block_index = first.outputs
    block_index.name, block_index.type = f"{result.name}_{BLOCK_INDEX}", ir.TensorType(ir.DataType.INT32)
    for other in others:
        other.resize_inputs(len(other.inputs) + 1)
        other.replace_input_with(len(other.inputs) - 1, block_index)


def kernel_node(node: onnx_ir.Node, shapes: Sequence[Sequence[int]]) -> KernelNode:
    """The manifest's record of a node whose inputs have these shapes."""
    operator, attributes = operator_of(node), attributes_of(node)
    fields = {name: attributes[name] for name in plugin_spec_of(operator).FIELDS}
    return KernelNode(
        op_type=node.op_type,
        operator=operator.name,
        shapes=tuple(map(tuple, shapes)),
        attributes={name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()},
    )


def kernel_records(model: onnx_ir.Model, *, dtype: str) -> tuple[KernelNode, ...]:
    """The manifest's records of the nodes that kernels can compute, for GPUs on which the kernels are faster.

    Equal nodes have one record. A type has no records if any of its nodes has no kernel, since an operator of ONNX
    Runtime is registered for all nodes of a type.
    """
    records, unsupported = dict[str, list[KernelNode]](), set[str]()
    for node in kernel_nodes(model):
        spec, record = plugin_spec_of(operator_of(node)), kernel_node(node, shapes_of_inputs(node))
        try:
            if dtype not in spec.DTYPES:
                raise ValueError(f"The kernel has no {dtype}; it has {', '.join(spec.DTYPES)}.")
            spec.check(record.shapes, record.operator_attributes)
        except ValueError as error:
            logger.info("attention runs without hdexport's kernels in ONNX Runtime on a GPU: %s", error)
            unsupported.add(node.op_type)
        better_on = spec.better_on(record.shapes, record.operator_attributes, dtype=dtype)
        if better_on is not None:
            record = replace(record, architectures=tuple(f"sm{number}" for number in better_on))
        of_node = [record]
        if has_shared_bias(node):
            # The kernels were not timed beside ONNX Runtime's native attention, which computes the short sequences.
            of_node = [replace(record, architectures=()), replace(record, op_type=record.op_type + LONG_SEQUENCES)]
        of_type = records.setdefault(node.op_type, [])
        of_type += [record for record in of_node if record not in of_type]
    return tuple(record for op_type, of_type in records.items() if op_type not in unsupported for record in of_type)
