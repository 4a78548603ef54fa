"""Write ONNX nodes as function calls: ``op.Add(x, 1)`` creates a node and returns its output.

Function bodies, graph passes and lowerings write nodes in this way alone. Calls look as onnxscript's builders have
them; three behaviors of `onnxscript.GraphBuilder` 0.7.2 are why `OpBuilder` exists: a number becomes a `CastLike` node
where the type of the other input is unknown, as in functions; constants of a loop move out of the loop, where ONNX
Runtime does not merge the nodes of equal layers; and every node runs shape inference.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hdplugins.constants import ONNX_OPSET

if TYPE_CHECKING:
    import onnx_ir


class OpBuilder:
    """Creates nodes in a graph; each ONNX operator is a method.

    A method takes the inputs in order, None for an omitted one, and the attributes by name; None omits an attribute.
    Numbers are inputs, too: integers become int64 constants, floats become float32 constants, lists of numbers become
    vectors. Equal numbers of a builder share a constant. Keywords that begin with an underscore are those of
    `onnxscript.OpBuilder`:

    * ``_outputs``: number of outputs, 1 by default, or the outputs themselves as names or values. A call returns a
      value for one output and a tuple of values for several;
    * ``_domain``: operator domain;
    * ``_name``: name of the node.

    An unknown operator raises onnx's SchemaError; an unknown attribute and a wrong number of inputs raise a TypeError.

    Args:
        insert: puts a new node into its graph; see `append`, `before` and `after`.
        name_value: operator type -> name of an output without a name; None lets the graph give names, which are unique
            in the graph but not in graphs inside it.
        opset: opset version of the ONNX operators; None for the newest one.
    """

    def __init__(
        self,
        insert: Callable[[onnx_ir.Node], None],
        *,
        name_value: Callable[[str], str] | None = None,
        opset: int | None = None,
    ) -> None:
        self._insert, self._name_value, self._opset = insert, name_value, opset
        self._constants: dict[str, onnx_ir.Value] = {}

    @classmethod
    def append(cls, graph: onnx_ir.Graph, **options: Any) -> OpBuilder:
        """Append nodes to a graph; `options` are those of the class."""
        return cls(graph.append, **options)

    @classmethod
    def before(cls, node: onnx_ir.Node, **options: Any) -> OpBuilder:
        """Insert nodes before a node."""
        assert node.graph is not None
        return cls(functools.partial(node.graph.insert_before, node), **options)

    @classmethod
    def after(cls, node: onnx_ir.Node, **options: Any) -> OpBuilder:
        """Insert nodes after a node, each one after the previous one."""
        last = node

        def insert(new: onnx_ir.Node) -> None:
            nonlocal last
            last.graph.insert_after(last, new)
            last = new

        return cls(insert, **options)

    def subgraph(
        self, body: Callable[..., Any], *inputs: onnx_ir.Value | None, prefix: str | None = None
    ) -> onnx_ir.Graph:
        """Build the graph of a loop or branch.

        Constants are nodes of the new graph. `prefix` starts the names of its values; None names them as this builder
        does. `body` takes an `OpBuilder` and the inputs, None for an omitted one, and returns a value or several.
        """
        import onnx_ir as ir

        graph = ir.Graph([value for value in inputs if value is not None], [], nodes=[], name=body.__name__)
        numbers = itertools.count()
        name_value = self._name_value if prefix is None else lambda op_type: f"{prefix}_{op_type}_{next(numbers)}"
        op = OpBuilder.append(graph, name_value=name_value, opset=self._opset)
        graph.outputs.extend(_sequence(body(op, *inputs)))
        return graph

    def new_name(self, prefix: str) -> str:
        """Return a name that no value of the function has, including its loops and branches."""
        assert self._name_value is not None
        return self._name_value(prefix)

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        return functools.partial(self.call, op_type)

    def call(
        self,
        op_type: str,
        *inputs: Any,
        _outputs: int | Sequence[str | onnx_ir.Value] = 1,
        _domain: str = "",
        _name: str | None = None,
        **attributes: Any,
    ) -> Any:
        """Create a node of a type that is a variable; ``op.Add(x, 1)`` calls it with the type ``Add``."""
        import onnx_ir as ir

        if not _domain:
            _check_signature(op_type, len(inputs), attributes, self._opset)
        values = [value if value is None or isinstance(value, ir.Value) else self._constant(value) for value in inputs]
        if isinstance(_outputs, int):
            _outputs = [ir.Value(name=self._name_value and self._name_value(op_type)) for _ in range(_outputs)]
        outputs = [ir.Value(name=output) if isinstance(output, str) else output for output in _outputs]
        plain = {key: int(value) if isinstance(value, ir.DataType) else value for key, value in attributes.items()}
        self._insert(ir.node(op_type, values, plain, domain=_domain, outputs=outputs, name=_name))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _constant(self, literal: float | Sequence[int] | Sequence[float]) -> onnx_ir.Value:
        """A constant with the shape of the number, [], or the list, [length].

        ONNX Runtime before 1.25 takes the attribute value_ints for a scalar when a Pad reads it, and GraphSurgeon
        0.6.1, Polygraphy 0.53.6 and onnxslim 0.1.98 make a double of value_float: hence a tensor.
        """
        import onnx_ir as ir

        key = repr(literal)
        if key not in self._constants:
            first = literal if isinstance(literal, (int, float)) else next(iter(literal), 0)
            dtype = ir.DataType.FLOAT if isinstance(first, float) else ir.DataType.INT64
            self._constants[key] = self.Constant(value=ir.tensor(literal, dtype))
        return self._constants[key]


def _check_signature(op_type: str, inputs: int, attributes: dict[str, Any], opset: int | None) -> None:
    known, min_inputs, max_inputs = _signature(op_type, opset)
    if not known.issuperset(attributes):
        raise TypeError(f"{op_type} has the attributes {sorted(known)}, not {sorted(attributes)}.")
    if not min_inputs <= inputs <= max_inputs:
        raise TypeError(f"{op_type} has {min_inputs} to {max_inputs} inputs, not {inputs}.")


@functools.cache
def _signature(op_type: str, opset: int | None) -> tuple[frozenset[str], int, int]:
    """Return the names of an operator's attributes, and its minimum and maximum number of inputs."""
    import onnx

    schema = onnx.defs.get_schema(op_type, opset or onnx.defs.onnx_opset_version())
    return frozenset(schema.attributes), schema.min_input, schema.max_input


def _sequence(returned: Any) -> Sequence[onnx_ir.Value]:
    return returned if isinstance(returned, (list, tuple)) else [returned]


def build_function(
    body: Callable[..., Any],
    *,
    domain: str,
    name: str,
    inputs: Sequence[str] | None = None,
    attributes: Sequence[str] = (),
    opset: int = ONNX_OPSET,
) -> onnx_ir.Function:
    """Build a function; its values, and those of its loops and branches, have names that differ.

    Args:
        body: takes an `OpBuilder` and the inputs, and returns a value or several.
        inputs: names of the inputs; None for the names of the body's parameters.
        attributes: names of the attributes that nodes of the function have.
        opset: opset version of the ONNX operators.
    """
    import onnx_ir as ir

    if inputs is None:
        _, *inputs = inspect.signature(body).parameters
    values, numbers = [ir.Value(name=each) for each in inputs], itertools.count()
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": opset}, name=name)
    op = OpBuilder.append(graph, name_value=lambda op_type: f"{op_type}_{next(numbers)}", opset=opset)
    graph.outputs.extend(_sequence(body(op, *values)))
    declared = [ir.Attr(each, ir.AttributeType.UNDEFINED, None) for each in attributes]
    return ir.Function(domain, name, graph=graph, attributes=declared)


def scan(
    op: OpBuilder,
    body: Callable[..., Any],
    *sequences: onnx_ir.Value | None,
    states: Sequence[onnx_ir.Value | int] = (),
    shapes: Sequence[Sequence[str]] = (),
) -> Any:
    """Run a body once per step of a loop, in a function.

    Args:
        body: takes an `OpBuilder`, the states and one element of each sequence, and returns the next states and then
            the outputs of the step, which are float32. The parameters' names start the names of the loop's inputs.
        sequences: values of one length, which the loop splits along the first axis; None for an omitted sequence, for
            which the body gets None.
        states: states before the first step. TensorRT's parser rejects a loop without a state
            (findings/tensorrt_rtx_keeps_results_of_loops.sh).
        shapes: names of the axes of each output of a step.

    Returns:
        The states after the last step, and then the outputs of all steps, stacked along a new first axis: a tuple, or
            the value where there is one.
    """
    import onnx_ir as ir

    _, *names = inspect.signature(body).parameters
    inputs = [*states, *sequences]
    elements = [
        None if value is None else ir.Value(name=op.new_name(name)) for name, value in zip(names, inputs, strict=True)
    ]
    graph = op.subgraph(body, *elements)
    for output, shape in zip(graph.outputs[len(states) :], shapes, strict=True):
        output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
    present = [value for value in inputs if value is not None]
    return op.Scan(*present, body=graph, num_scan_inputs=len(present) - len(states), _outputs=len(graph.outputs))


def cond(
    op: OpBuilder,
    condition: onnx_ir.Value,
    true_body: Callable[[OpBuilder], Any],
    false_body: Callable[[OpBuilder], Any],
    *,
    name: str | None = None,
    dtype: onnx_ir.DataType | None = None,
) -> Any:
    """Return the outputs of one of two branches, a value or a tuple of values.

    Args:
        condition: [], bool.
        true_body: takes an `OpBuilder`, and returns values of new nodes; so does `false_body`.
        name: in a graph, the name of the output, which starts the names in the branches; None in a function.
        dtype: data type of the output, in a graph.
    """
    import onnx_ir as ir

    branches = {}
    for branch, body in (("then", true_body), ("else", false_body)):
        graph = op.subgraph(body, prefix=name and f"{name}_{branch}")
        for output in graph.outputs if dtype is not None else ():
            output.dtype = dtype
        branches[f"{branch}_branch"] = graph
    outputs = len(graph.outputs) if name is None else [ir.val(name, dtype)]
    return op.If(condition, **branches, _outputs=outputs)


def float_attribute(op: OpBuilder, name: str) -> onnx_ir.Value:
    """Return the float32 attribute of that name of a function's node, [].

    Once a tool has inlined the function, the constant has the attribute value_float, which other tools fold to a
    double: hence the Cast.
    """
    import onnx_ir as ir

    return op.Cast(_attribute(op, name, "value_float", ir.AttributeType.FLOAT), to=ir.DataType.FLOAT)


def integer_attribute(op: OpBuilder, name: str) -> onnx_ir.Value:
    """Return the int64 attribute of that name of a function's node, []."""
    import onnx_ir as ir

    return _attribute(op, name, "value_int", ir.AttributeType.INT)


def _attribute(op: OpBuilder, name: str, kind: str, type_: onnx_ir.AttributeType) -> onnx_ir.Value:
    import onnx_ir as ir

    return op.Constant(**{kind: ir.RefAttr(kind, name, type_)})
