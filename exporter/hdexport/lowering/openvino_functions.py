"""Implementations of attention for OpenVINO: functions of standard operators, which are inlined at the end."""

from __future__ import annotations

import abc
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hdexport.lowering.nodes import add_function
from hdplugins.op_builder import OpBuilder, build_function

if TYPE_CHECKING:
    import onnx_ir

    from hdexport.lowering.lowering import SharedParts

_DOMAIN = "hdexport.openvino"
"""Domain of these functions; hdexport's operators have another domain."""

OPSET = 24
"""Opset of these functions: it has the operator ``Attention``, which OpenVINO fuses."""

Body = Callable[..., Any]
"""Takes an `OpBuilder`, inputs, and Python numbers by name; returns a value or a tuple of values."""


class OpenVinoLowering(abc.ABC):
    """A second base class of a `Lowering` for which OpenVINO has something faster than the inlined body."""

    @abc.abstractmethod
    def for_openvino(self, node: onnx_ir.Node, parts: SharedParts) -> bool:
        """Replace a node of a float32 graph in place; returns whether the result depends on `SharedParts.padded`."""


def call_function(
    op: OpBuilder, parts: SharedParts, body: Body, inputs: Sequence[onnx_ir.Value], /, **numbers: Any
) -> Sequence[onnx_ir.Value]:
    """The outputs of a new node that calls a function, which the graph has once for equal numbers.

    Until the functions are inlined, other functions of the graph may have another opset.
    """
    key = (call_function, body, len(inputs), *numbers.items())
    function = parts.once(key, lambda: _add_function(parts, body, len(inputs), numbers))
    outputs = op.call(function.name, *inputs, _domain=_DOMAIN, _outputs=len(function.outputs))
    return outputs if isinstance(outputs, tuple) else (outputs,)


def call_once(
    op: OpBuilder, parts: SharedParts, body: Body, inputs: Sequence[onnx_ir.Value], /, **numbers: Any
) -> Sequence[onnx_ir.Value]:
    """The outputs of a function, which is called once for equal inputs and numbers; see `call_function`."""
    key = (call_once, body, *inputs, *numbers.items())
    return parts.once(key, lambda: call_function(op, parts, body, inputs, **numbers))


def _add_function(parts: SharedParts, body: Body, inputs: int, numbers: dict[str, Any]) -> onnx_ir.Function:
    _, *names = inspect.signature(body).parameters
    function = build_function(
        functools.partial(body, **numbers),
        domain=_DOMAIN,
        name=parts.new_name(body.__name__),
        inputs=names[:inputs],
        opset=OPSET,
    )
    return add_function(parts.model, function)
