"""Functions of standard operators, written as `hdplugins.attention.body_maker` has them, and inlined in the end."""

from __future__ import annotations

__all__ = ["OPSET", "SharedFunctions"]

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir

    from hdexport.lowering.multi_head_attention import Insertion

_DOMAIN = "hdexport.openvino"
"""Of these functions, which are no operators of ours."""

OPSET = 24
"""Of the operator ``Attention``, which OpenVINO fuses."""

Body = Callable[..., Any]
"""Takes `op`, inputs, and Python's numbers by name; returns a value or a tuple of values."""


class SharedFunctions:
    """The functions of one graph, each once for the same numbers, and the results that layers alike share.

    Args:
        model: the graph; its other functions may be of another opset until all are inlined.
    """

    def __init__(self, model: onnx_ir.Model) -> None:
        self._model = model
        self._functions: dict[tuple[object, ...], tuple[str, int]] = {}
        self._made: dict[tuple[object, ...], Sequence[onnx_ir.Value]] = {}

    def call(
        self, insertion: Insertion, body: Body, inputs: Sequence[onnx_ir.Value], **numbers: Any
    ) -> Sequence[onnx_ir.Value]:
        """The outputs of a new node that calls a function.

        Args:
            insertion: before the layer that needs them.
            body: of the function.
            inputs: of the function.
            numbers: that the body takes by name.
        """
        import onnx_ir as ir

        key = (body, len(inputs), *numbers.items())
        if key not in self._functions:
            self._functions[key] = self._add(body, len(inputs), numbers)
        name, outputs = self._functions[key]
        node = ir.node(name, inputs, domain=_DOMAIN, num_outputs=outputs)
        insertion.insert(node)
        return node.outputs

    def shared(
        self, insertion: Insertion, body: Body, inputs: Sequence[onnx_ir.Value], **numbers: Any
    ) -> Sequence[onnx_ir.Value]:
        """The outputs of a function, which is called once for the same inputs and numbers; arguments as of `call`."""
        key = (body, *inputs, *numbers.items())
        if key not in self._made:
            self._made[key] = self.call(insertion, body, inputs, **numbers)
        return self._made[key]

    def _add(self, body: Body, inputs: int, numbers: dict[str, Any]) -> tuple[str, int]:
        """Give the graph a function; returns its name, and how many outputs it has."""
        import onnx_ir as ir

        from hdplugins.attention.body_maker import function_of_body

        _, *names = inspect.signature(body).parameters
        proto = function_of_body(
            functools.partial(body, **numbers),
            domain=_DOMAIN,
            name=f"{body.__name__}_{len(self._functions)}",
            inputs=names[:inputs],
            opset=OPSET,
        )
        function = ir.serde.deserialize_function(proto)
        self._model.functions[function.identifier()] = function
        return function.name, len(function.outputs)
