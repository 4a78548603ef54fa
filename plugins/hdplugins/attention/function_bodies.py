"""The ONNX functions that compute an operator's nodes with standard operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hdplugins.attention.operator import BodyVariant, Operator
from hdplugins.constants import ONNX_DOMAIN
from hdplugins.op_builder import build_function

if TYPE_CHECKING:
    import onnx_ir


@dataclass(frozen=True, kw_only=True)
class FunctionBodies:
    """The function bodies of the nodes of an operator for which the attributes that decide a body are equal.

    A body takes an `OpBuilder` and the inputs, and returns the output. States and output are [batch, tokens, heads,
    head_dim].

    Attributes:
        suffix: end of the functions' names, after the name of the operator. Bodies that differ need names that differ.
            Overloads of one name would be the standard's way, but TensorRT-RTX 1.7.1 gives every node the first
            overload without warning.
        batched: the body in the batched variant.
        blockwise: the body in the blockwise variant; None for an operator without such a body.
    """

    suffix: str = ""
    batched: Callable[..., onnx_ir.Value]
    blockwise: Callable[..., onnx_ir.Value] | None = None


def function_of_node(
    operator: Operator,
    *,
    inputs: int,
    attributes: Mapping[str, Any],
    grouped: bool = False,
    variant: BodyVariant = BodyVariant.BATCHED,
) -> onnx_ir.Function:
    """Build the function that computes a node of the portable graph, and the other nodes of that name.

    `inputs` is the number of the node's inputs. A ValueError says that the operator takes another number, or that the
    attributes define nothing.
    """
    max_inputs = len(operator.inputs)
    accepted = sorted({max_inputs - len(operator.optional_inputs), max_inputs})
    if inputs not in accepted:
        raise ValueError(f"{operator.name} has {' or '.join(map(str, accepted))} inputs, not {inputs}.")
    operator.check(**attributes)
    described = {"grouped": grouped} if operator.groups_heads else {}
    bodies = operator.implementation("onnx_functions").function_bodies(
        operator.inputs[:inputs], attributes, **described
    )
    body = bodies.batched if variant is BodyVariant.BATCHED else bodies.blockwise
    assert body is not None
    return operator_function(operator, body, inputs=inputs, suffix=bodies.suffix)


def operator_function(
    operator: Operator, body: Callable[..., onnx_ir.Value], *, inputs: int, suffix: str = ""
) -> onnx_ir.Function:
    """Build the function of an operator's nodes with that number of inputs, named after the operator and the suffix.

    onnx raises a ValidationError for a loop that appends a node to the graph around it.
    """
    import onnx
    import onnx_ir as ir

    built = build_function(
        body,
        domain=ONNX_DOMAIN,
        name=operator.name + suffix,
        inputs=operator.inputs[:inputs],
        attributes=tuple(operator.attributes),
    )
    onnx.checker.check_function(ir.serde.serialize_function(built))
    return built
