"""Give every node of our domain the function body that makes the model valid for any ONNX runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdexport.lowering.nodes import add_function, body_of, operator_nodes
from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION
from hdruntime.errors import ExportError

if TYPE_CHECKING:
    import onnx
    import onnx_ir


def attach_functions(model: onnx_ir.Model) -> int:
    """Attach the bodies of the operators that a graph uses, in place; nodes take the names of their bodies. Returns the
    number of nodes of the domain ``hdexport``."""
    nodes = operator_nodes(model)
    bodies: dict[str, onnx.FunctionProto] = {}
    for node in nodes:
        body = body_of(node)
        if bodies.setdefault(body.name, body) != body:
            raise ExportError(
                f"The nodes {body.name} have {len(bodies[body.name].input)} and {len(body.input)} inputs, "
                "for which one body cannot serve.",
                hint="Please report the model and the versions that `hdexport doctor` prints.",
            )
        node.op_type = body.name
    for body in bodies.values():
        add_function(model, body)
    model.graph.opset_imports[ONNX_DOMAIN] = ONNX_DOMAIN_VERSION
    return len(nodes)
