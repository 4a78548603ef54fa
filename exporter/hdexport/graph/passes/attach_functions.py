"""Give every node of hdexport's domain the function that makes the model valid for any ONNX runtime."""

from __future__ import annotations

import logging

import onnx_ir as ir

from hdexport.lowering.nodes import add_function, body_of, operator_nodes
from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION
from hdruntime.errors import ExportError

logger = logging.getLogger(__name__)


class AttachFunctions(ir.passes.InPlacePass):
    """Attach the functions of the operators that a graph uses; nodes take the names of their functions.

    An ExportError says that nodes need two functions of one name.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = operator_nodes(model)
        functions: dict[str, ir.Function] = {}
        for node in nodes:
            body = body_of(node)
            first = functions.setdefault(body.name, body)
            if first is not body and ir.serde.serialize_function(first) != ir.serde.serialize_function(body):
                raise ExportError(
                    f"The nodes {body.name} have {len(first.inputs)} and {len(body.inputs)} inputs, "
                    "for which one body cannot serve.",
                    hint="Please report the model and the versions that `hdexport doctor` prints.",
                )
            node.op_type = body.name
        for function in functions.values():
            add_function(model, function)
        model.graph.opset_imports[ONNX_DOMAIN] = ONNX_DOMAIN_VERSION
        if nodes:
            logger.info("%d nodes have the functions %s", len(nodes), ", ".join(functions))
        return ir.passes.PassResult(model, modified=bool(nodes))
