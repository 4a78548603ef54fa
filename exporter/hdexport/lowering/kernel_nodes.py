"""The nodes of a graph that compiled kernels can compute: by plugins in TensorRT, by operators in ONNX Runtime."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdexport.lowering.nodes import attributes_of, operator_nodes, operator_of
from hdplugins.attention.plugin_face import face_of
from hdplugins.tensorrt.plugins import plugin_operators
from hdruntime.bundle.manifest import KernelNode
from hdruntime.errors import ExportError

if TYPE_CHECKING:
    import onnx_ir

logger = logging.getLogger(__name__)


def kernel_nodes(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    """The nodes whose operators have kernels, in graph order."""
    operators = plugin_operators()
    return [node for node in operator_nodes(model) if operator_of(node) in operators]


def shapes_of_inputs(node: onnx_ir.Node, inputs: Sequence[onnx_ir.Value | None] | None = None) -> list[list[int]]:
    """The shape of each input that a node's operator has, axes that vary are 1; `inputs` are those, None for all."""
    shapes = []
    for value in node.inputs if inputs is None else inputs:
        if value is None or value.shape is None:
            raise ExportError(
                f"The graph does not state the shapes that {node.op_type} {node.name} takes, and a kernel is chosen by "
                "them.\nBuild with --attention-impl native, and please report the model."
            )
        shapes.append([axis if isinstance(axis, int) else 1 for axis in value.shape])
    return shapes


def kernel_records(model: onnx_ir.Model, *, dtype: str) -> tuple[KernelNode, ...]:
    """What a manifest says of the nodes that kernels can compute, alike ones once; () where there is none for some
    node: an operator of ONNX Runtime is registered for all nodes of its type."""
    records: list[KernelNode] = []
    for node in kernel_nodes(model):
        operator, attributes = operator_of(node), attributes_of(node)
        face, shapes = face_of(operator), shapes_of_inputs(node)
        try:
            if dtype not in face.DTYPES:
                raise ValueError(f"The kernel has no {dtype}; it has {', '.join(face.DTYPES)}.")
            face.check(shapes, attributes)
        except ValueError as error:
            logger.info("attention runs by standard operators in ONNX Runtime on a GPU: %s", error)
            return ()
        record = KernelNode(
            op_type=node.op_type,
            operator=operator.name,
            shapes=tuple(map(tuple, shapes)),
            attributes={name: list(value) if isinstance(value, tuple) else value for name, value in attributes.items()},
        )
        if record not in records:
            records.append(record)
    return tuple(records)
