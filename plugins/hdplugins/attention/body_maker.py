"""Function bodies of standard ONNX operators, written as Python functions.

A body is a function whose first parameter is `op`. A call such as ``op.Add(x, 1)`` appends a node to the graph and
returns the output of the node. Python integers become int64 constants, floats become float32 constants, and lists of
numbers become vectors. The body of a loop or of a branch is a nested function: it has an `op` of its own, and it may
read the values of the function around it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import AttributeProto, GraphProto, TensorProto, helper

from hdplugins.attention.operator import BodyVariant, Operator
from hdplugins.constants import ONNX_DOMAIN, ONNX_OPSET


@dataclass(frozen=True)
class Value:
    """A value of a graph.

    Attributes:
        name: the name, which no other value of the function has.
    """

    name: str


class Op:
    """Appends nodes to a graph. Each operator of ONNX in an opset is a method.

    A method takes the inputs in order, None for one that is left out, and the attributes by name. `_outputs` is the
    number of outputs, where a node has several. `_name` is the name of the output, by which others find the value; by
    default it is the operator and a number. ONNX refuses an unknown operator by a SchemaError; unknown attributes and
    another number of inputs are a TypeError.
    """

    def __init__(self, nodes: Any, numbers: Iterator[int], opset: int) -> None:
        self._nodes, self._numbers, self._opset = nodes, numbers, opset
        self._constants: dict[str, Value] = {}

    def new_name(self, beginning: str) -> str:
        """Return a name that no value of the function has, nor any value of its loops."""
        return f"{beginning}_{next(self._numbers)}"

    def within(self, graph: GraphProto) -> Op:
        """Return what appends nodes to the graph of a loop or a branch.

        The graph has constants of its own. ONNX Runtime merges equal nodes of several layers, but not nodes whose
        constants are read inside a loop.
        """
        return Op(graph.node, self._numbers, self._opset)

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        return functools.partial(self._append, op_type)

    def _append(self, op_type: str, *inputs: Any, _outputs: int = 1, _name: str = "", **attributes: Any) -> Any:
        known, min_inputs, max_inputs = _signature(op_type, self._opset)
        if not known.issuperset(attributes):
            raise TypeError(f"{op_type} has the attributes {sorted(known)}, not {sorted(attributes)}.")
        if not min_inputs <= len(inputs) <= max_inputs:
            raise TypeError(f"{op_type} has {min_inputs} to {max_inputs} inputs, not {len(inputs)}.")
        names = [self._name_of(operand) for operand in inputs]
        outputs = [Value(_name or self.new_name(op_type)) for _ in range(_outputs)]
        node = helper.make_node(op_type, names, [output.name for output in outputs])
        node.attribute.extend(
            value if isinstance(value, AttributeProto) else helper.make_attribute(name, value)
            for name, value in attributes.items()
        )
        self._nodes.append(node)
        return outputs[0] if _outputs == 1 else tuple(outputs)

    def _name_of(self, operand: Value | float | list[int] | None) -> str:
        if operand is None:
            return ""
        return operand.name if isinstance(operand, Value) else self._constant(operand).name

    def _constant(self, literal: float | list[int]) -> Value:
        key = repr(literal)
        if key not in self._constants:
            # A tensor: ONNX Runtime before 1.26 takes the attribute value_ints for a scalar when a Pad reads it, and
            # GraphSurgeon 0.6.1, Polygraphy 0.53.6 and onnxslim 0.1.98 make a double of value_float.
            numbers: list[Any] = literal if isinstance(literal, list) else [literal]
            shape = [len(numbers)] if isinstance(literal, list) else []
            dtype = TensorProto.FLOAT if isinstance(literal, float) else TensorProto.INT64
            self._constants[key] = self._append("Constant", value=helper.make_tensor("", dtype, shape, numbers))
        return self._constants[key]


@functools.cache
def _signature(op_type: str, opset: int) -> tuple[frozenset[str], int, int]:
    """Return the names of an operator's attributes, and its minimum and maximum number of inputs."""
    schema = onnx.defs.get_schema(op_type, opset)
    return frozenset(schema.attributes), schema.min_input, schema.max_input


@dataclass(frozen=True, kw_only=True)
class FunctionBodies:
    """The function bodies of an operator's nodes that agree in every attribute that decides a body.

    A body is a function that takes `op` and the inputs, and returns the result. States and result are [batch, tokens,
    heads, head_dim].

    Attributes:
        suffix: the end of the names of the bodies, behind the name of the operator. Bodies that differ need names that
            differ. Overloads of one name would be the standard's way, but TensorRT-RTX 1.7.1 gives every node the first
            overload without warning.
        sequential: the body in the blockwise variant; None for an operator without such a body.
    """

    suffix: str = ""
    batched: Callable[..., Value]
    blockwise: Callable[..., Value] | None = None


def function_of_node(
    operator: Operator,
    *,
    inputs: int,
    attributes: Mapping[str, Any],
    grouped: bool = False,
    variant: BodyVariant = BodyVariant.BATCHED,
) -> onnx.FunctionProto:
    """Build the function body for a node of the portable graph, and for the others of the same name.

    `inputs` is how many the node has. A ValueError says that the operator takes another number, or that the attributes
    define nothing; ONNX refuses, by a ValidationError, a loop that appends a node to the graph around it.
    """
    most = len(operator.inputs)
    allowed = sorted({most - len(operator.optional_inputs), most})
    if inputs not in allowed:
        raise ValueError(f"{operator.name} has {' or '.join(map(str, allowed))} inputs, not {inputs}.")
    operator.check(**attributes)
    described = {"grouped": grouped} if operator.groups_heads else {}
    bodies = operator.implementation("onnx_functions").function_bodies(
        operator.inputs[:inputs], attributes, **described
    )
    body = bodies.batched if variant is BodyVariant.BATCHED else bodies.blockwise
    assert body is not None
    return function(operator, body, inputs=inputs, suffix=bodies.suffix)


def function(operator: Operator, body: Callable[..., Value], *, inputs: int, suffix: str = "") -> onnx.FunctionProto:
    """Build a function body for an operator's nodes with so many inputs, named like the operator and the suffix."""
    name, names = operator.name + suffix, operator.inputs[:inputs]
    proto = function_of_body(body, domain=ONNX_DOMAIN, name=name, inputs=names, attributes=tuple(operator.attributes))
    onnx.checker.check_function(proto)
    return proto


def function_of_body(
    body: Callable[..., Any],
    *,
    domain: str,
    name: str,
    inputs: Sequence[str] | None = None,
    attributes: Sequence[str] = (),
    opset: int = ONNX_OPSET,
) -> onnx.FunctionProto:
    """Build a function.

    Args:
        body: a function that takes `op` and the inputs, and returns a value or a tuple of values.
        inputs: the names of the inputs; None for the names that the body gives to its parameters.
        attributes: the names of the attributes that the nodes have.
        opset: of the operators of ONNX.
    """
    if inputs is None:
        _, *inputs = inspect.signature(body).parameters
    opsets = [helper.make_opsetid("", opset)]
    proto = onnx.FunctionProto(domain=domain, name=name, input=inputs, attribute=attributes, opset_import=opsets)
    outputs = _outputs_of(body(Op(proto.node, itertools.count(), opset), *map(Value, proto.input)))
    proto.output.extend(output.name for output in outputs)
    return proto


def scan(
    op: Op,
    body: Callable[..., Any],
    *sequences: Value | None,
    states: Sequence[Value | int] = (),
    shapes: Sequence[Sequence[str]] = (),
) -> Any:
    """Run a body once per step of a loop.

    Args:
        body: a function that takes `op`, the states and one element of each sequence, and returns the next states and
            then the results of the step. Results are float32. The names of the parameters begin the names of the loop's
            inputs.
        sequences: the values that the loop splits along the first axis; all have the same length. None stands for a
            sequence that a body has not always, and the body gets None.
        states: the states before the first step. TensorRT's parser refuses a loop without a state.
        shapes: the names of the axes of each result of a step.

    Returns:
        The states after the last step, and then the results of all steps, stacked along a new first axis: a tuple, or
            the value where there is one.
    """
    _, *names = inspect.signature(body).parameters
    inputs_of_steps = [*states, *sequences]
    elements = [
        None if value is None else Value(op.new_name(name)) for name, value in zip(names, inputs_of_steps, strict=True)
    ]
    graph = GraphProto(name=body.__name__)
    graph.input.extend(onnx.ValueInfoProto(name=element.name) for element in elements if element is not None)
    outputs = _outputs_of(body(op.within(graph), *elements))
    graph.output.extend(onnx.ValueInfoProto(name=state.name) for state in outputs[: len(states)])
    for result, shape in zip(outputs[len(states) :], shapes, strict=True):
        graph.output.append(helper.make_tensor_value_info(result.name, TensorProto.FLOAT, shape))
    inputs = [value for value in inputs_of_steps if value is not None]
    return op.Scan(*inputs, body=graph, num_scan_inputs=len(inputs) - len(states), _outputs=len(outputs))


def choose(op: Op, condition: Value, then: Callable[[Op], Any], otherwise: Callable[[Op], Any]) -> Any:
    """What one of two bodies returns, a value or a tuple of values; the condition is [], a boolean.

    A body is a function that takes `op`, and returns values that its `op` made.
    """
    graphs = []
    for body in (then, otherwise):
        graph = GraphProto(name=body.__name__)
        outputs = _outputs_of(body(op.within(graph)))
        graph.output.extend(onnx.ValueInfoProto(name=output.name) for output in outputs)
        graphs.append(graph)
    return op.If(condition, then_branch=graphs[0], else_branch=graphs[1], _outputs=len(outputs))


def _outputs_of(returned: Any) -> Sequence[Value]:
    return [returned] if isinstance(returned, Value) else returned


def float_attribute(op: Op, name: str) -> Value:
    """Return the float32 value, [], that each node has in the attribute of that name.

    Once a tool has inlined the body, the constant has the attribute value_float, which other tools fold to a double.
    """
    return op.Cast(_attribute(op, name, "value_float", AttributeProto.FLOAT), to=TensorProto.FLOAT)


def integer_attribute(op: Op, name: str) -> Value:
    """Return the int64 value, [], that each node has in the attribute of that name."""
    return _attribute(op, name, "value_int", AttributeProto.INT)


def _attribute(op: Op, name: str, kind: str, type_: AttributeProto.AttributeType) -> Value:
    return op.Constant(**{kind: AttributeProto(name=kind, type=type_, ref_attr_name=name)})
