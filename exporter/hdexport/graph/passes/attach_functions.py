"""Give every node of our domain the function body that makes the model valid for any ONNX runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdexport.lowering.nodes import add_function, body_of, operator_nodes
from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION
from hdruntime.errors import ExportError

if TYPE_CHECKING:
    import onnx_ir


def attach_functions(model: onnx_ir.Model) -> int:
    """Attach the bodies of the operators that a graph uses, in place; nodes take the names of their bodies. Returns the
    number of nodes of the domain ``hdexport``."""
    import onnx_ir as ir

    nodes = operator_nodes(model)
    functions: dict[str, onnx_ir.Function] = {}
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
    return len(nodes)
