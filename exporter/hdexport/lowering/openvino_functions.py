"""Forms of attention for OpenVINO, by functions of standard operators, which are written as
`hdplugins.attention.body_maker` has them and inlined in the end."""

from __future__ import annotations

import abc
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hdexport.lowering.nodes import add_function

if TYPE_CHECKING:
    import onnx_ir

    from hdexport.lowering.lowering import SharedParts
    from hdexport.lowering.nodes import Insertion

_DOMAIN = "hdexport.openvino"
"""Domain of these functions, which are no operators of ours."""

OPSET = 24
"""Opset of these functions: it has the operator ``Attention``, which OpenVINO fuses."""

Body = Callable[..., Any]
"""Takes `op`, inputs, and Python's numbers by name; returns a value or a tuple of values."""


class OpenVinoForm(abc.ABC):
    """A second base of an attention's `Lowering` where OpenVINO has something faster than the inlined body."""

    @abc.abstractmethod
    def for_openvino(self, node: onnx_ir.Node, parts: SharedParts) -> bool:
        """Replace a node of a float32 graph, in place; returns whether the graph differs where batches have no
        padding."""


def call_function(
    insertion: Insertion, parts: SharedParts, body: Body, inputs: Sequence[onnx_ir.Value], /, **numbers: Any
) -> Sequence[onnx_ir.Value]:
    """The outputs of a new node that calls a function, which the graph has once for the same numbers.

    Until all are inlined, other functions of the graph may be of another opset.
    """
    import onnx_ir as ir

    key = (call_function, body, len(inputs), *numbers.items())
    function = parts.once(key, lambda: _add_function(parts, body, len(inputs), numbers))
    node = ir.node(function.name, inputs, domain=_DOMAIN, num_outputs=len(function.outputs))
    insertion.insert(node)
    return node.outputs


def call_once(
    insertion: Insertion, parts: SharedParts, body: Body, inputs: Sequence[onnx_ir.Value], /, **numbers: Any
) -> Sequence[onnx_ir.Value]:
    """The outputs of a function, which is called once for the same inputs and numbers; see `call_function`."""
    key = (call_once, body, *inputs, *numbers.items())
    return parts.once(key, lambda: call_function(insertion, parts, body, inputs, **numbers))


def _add_function(parts: SharedParts, body: Body, inputs: int, numbers: dict[str, Any]) -> onnx_ir.Function:
    from hdplugins.attention.body_maker import function_of_body

    _, *names = inspect.signature(body).parameters
    proto = function_of_body(
        functools.partial(body, **numbers),
        domain=_DOMAIN,
        name=parts.new_name(body.__name__),
        inputs=names[:inputs],
        opset=OPSET,
    )
    return add_function(parts.model, proto)
