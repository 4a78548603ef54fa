"""Give every node of our domain the function body that makes the model valid for any ONNX runtime."""

from __future__ import annotations

__all__ = ["attach_functions"]

from typing import TYPE_CHECKING

from hdexport.passes.graph_nodes import operator_nodes
from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION, OPERATORS
from hdruntime.errors import ExportError

if TYPE_CHECKING:
    import onnx_ir


def attach_functions(model: onnx_ir.Model) -> int:
    """Attach the bodies of the operators that a graph uses, in place.

    Returns:
        The number of nodes of the domain ``hdexport``.

    Raises:
        ExportError: nodes of one operator differ in their number of inputs, for which a body each would be needed.
    """
    import onnx_ir as ir

    nodes = operator_nodes(model)
    arities: dict[str, set[int]] = {}
    for node in nodes:
        arities.setdefault(node.op_type, set()).add(len(node.inputs))
    for name, counts in arities.items():
        if len(counts) > 1:
            raise ExportError(f"The nodes {name} have {sorted(counts)} inputs; one body serves one number of inputs.")
        body = OPERATORS[name].face("onnx_function").function_of_arity(counts.pop())
        function = ir.serde.deserialize_function(body)
        model.functions[function.identifier()] = function
    model.graph.opset_imports[ONNX_DOMAIN] = ONNX_DOMAIN_VERSION
    return len(nodes)
