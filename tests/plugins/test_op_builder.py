"""Nodes written as Python calls: their order, constants and names, and the mistakes that are rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx_ir import Value

from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION, ONNX_OPSET, Operator
from hdplugins.attention.function_bodies import operator_function
from hdplugins.op_builder import OpBuilder, cond, float_attribute, integer_attribute, scan
from support.function_bodies import nodes_within

FLOAT = ir.DataType.FLOAT

OPERATOR = Operator(
    name="Toy", version=1, package=__name__, inputs=("x",), states=1, attributes=dict.fromkeys(("scale", "count"))
)


def proto_of(body: Callable[..., Value]) -> onnx.FunctionProto:
    return ir.serde.serialize_function(operator_function(OPERATOR, body, inputs=1))


def answer_of(body: Callable[..., Value], x: Any) -> np.ndarray:
    """The answer of a node with scale=0.5 and count=3, by ONNX's own evaluator."""
    proto = proto_of(body)
    x = np.asarray(x)
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    node = helper.make_node("Toy", ["x"], ["y"], domain=ONNX_DOMAIN, scale=0.5, count=3)
    graph = helper.make_graph(
        [node],
        "toy",
        [helper.make_tensor_value_info("x", kind, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.UNDEFINED, None)],
    )
    opsets = [helper.make_opsetid("", ONNX_OPSET), helper.make_opsetid(ONNX_DOMAIN, ONNX_DOMAIN_VERSION)]
    model = helper.make_model(graph, functions=[proto], opset_imports=opsets, ir_version=10)
    (answer,) = ReferenceEvaluator(model).run(None, {"x": x})
    return answer


def test_numbers_become_constants_of_a_type_that_their_kind_decides() -> None:
    def body(op: OpBuilder, x: Value) -> Value:
        return op.Add(op.Mul(x, 2.0), op.Cast(op.ReduceSum(op.Add([1, 2], 1), keepdims=0), to=TensorProto.FLOAT))

    answer = answer_of(body, np.float32([1, 2]))
    assert answer.dtype == np.float32
    assert answer.tolist() == [7, 9]


def test_a_list_is_held_with_its_shape() -> None:
    """ONNX Runtime before 1.26 refuses a Pad whose amounts are the attribute value_ints."""
    proto = proto_of(lambda op, x: op.Pad(x, [1, 2]))
    (constant,) = [node for node in proto.node if node.op_type == "Constant"]
    assert list(constant.attribute[0].t.dims) == [2]


def test_equal_numbers_share_a_constant() -> None:
    proto = proto_of(lambda op, x: op.Add(op.Add(x, 1), op.Add(x, 1)))
    assert [node.op_type for node in proto.node] == ["Constant", "Add", "Add", "Add"]


def test_attributes_are_those_of_each_node() -> None:
    def body(op: OpBuilder, x: Value) -> Value:
        return op.Mul(op.Mul(x, float_attribute(op, "scale")), op.CastLike(integer_attribute(op, "count"), x))

    assert answer_of(body, np.float32(4)) == 6


@pytest.mark.pinned  # the evaluator of onnx 1.20 lacks them
def test_a_loop_reads_the_values_around_it_and_returns_states_and_results() -> None:
    def body(op: OpBuilder, x: Value) -> Value:
        doubled = op.Mul(x, 2.0)

        def step(op: OpBuilder, number: Value, total: Value, element: Value) -> tuple[Value, Value, Value]:
            inner = op.ReduceSum(doubled, keepdims=0)
            return op.Add(number, 1), op.Add(total, element), op.Add(element, inner)

        number, total, results = scan(op, step, x, states=[0, op.Constant(value_float=0.0)], shapes=[()])
        return op.Concat(op.CastLike(op.Unsqueeze(number, [0]), x), op.Unsqueeze(total, [0]), results, axis=0)

    assert answer_of(body, np.float32([1, 10, 100])).tolist() == [3, 111, 223, 232, 322]


@pytest.mark.parametrize(("x", "expected"), [(1.0, [10.0, 3.0]), (-1.0, [-10.0, 4.0])])
def test_a_choice_returns_what_the_chosen_body_returns(x: float, expected: list[float]) -> None:
    def body(op: OpBuilder, x: Value) -> Value:
        tenfold = op.Mul(x, 10.0)

        def three(op: OpBuilder) -> tuple[Value, Value]:
            return op.Identity(tenfold), op.Constant(value_float=3.0)

        def four(op: OpBuilder) -> tuple[Value, Value]:
            return op.Identity(tenfold), op.Constant(value_float=4.0)

        values = cond(op, op.Greater(x, 0.0), three, four)
        return op.Concat(*(op.Unsqueeze(value, [0]) for value in values), axis=0)

    assert answer_of(body, np.float32(x)).tolist() == expected


def test_no_two_values_of_a_body_have_one_name() -> None:
    def body(op: OpBuilder, x: Value) -> Value:
        def step(op: OpBuilder, element: Value) -> Value:
            return scan(op, lambda op, element: op.Add(element, 1.0), element, shapes=[("row",)])

        return scan(op, step, x, shapes=[("rows", "row")])

    names = [name for node in nodes_within(proto_of(body)) for name in node.output]
    assert len(names) == len(set(names)) == 4


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (lambda op, x: op.Softmax(x, axes=1), TypeError, r"Softmax has the attributes \['axis'\], not \['axes'\]"),
        (lambda op, x: op.Add(x), TypeError, "Add has 2 to 2 inputs, not 1"),
        (lambda op, x: op.Adds(x, x), onnx.defs.SchemaError, "Adds"),
        (
            lambda op, x: scan(op, lambda inner, element: op.Add(element, 1.0), x, shapes=[()]),
            onnx.checker.ValidationError,
            "element",
        ),
    ],
    ids=["attribute", "inputs", "operator", "loop"],
)
def test_a_mistake_is_refused(body: Callable[..., Value], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        proto_of(body)


def chain() -> ir.Graph:
    """x -> Neg -> Abs -> y."""
    x = ir.val("x", ir.DataType.FLOAT, [3])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": ONNX_OPSET}, name="chain")
    op = OpBuilder.append(graph)
    graph.outputs.append(op.Abs(op.Neg(x), _outputs=["y"], _name="last"))
    return graph


def test_nodes_are_inserted_before_or_after_a_node_in_the_order_of_the_calls() -> None:
    graph = chain()
    negate, last = graph
    before, after = OpBuilder.before(negate), OpBuilder.after(negate)
    before.Exp(before.Add(graph.inputs[0], 1.0))
    after.Sqrt(after.Mul(negate.outputs[0], [2.0, 3.0, 4.0]))
    assert [node.op_type for node in graph] == ["Constant", "Add", "Exp", "Neg", "Constant", "Mul", "Sqrt", "Abs"]
    assert (last.name, graph.outputs[0].name) == ("last", "y")


def test_outputs_attributes_and_domains_are_as_the_call_says() -> None:
    graph = chain()
    typed = ir.val("typed", ir.DataType.FLOAT16, [3])
    op = OpBuilder.append(graph)
    assert op.Cast(graph.inputs[0], to=ir.DataType.FLOAT16, _outputs=[typed]) is typed
    first, second = op.Other(graph.inputs[0], None, 1, scale=0.5, unused=None, _domain="other", _outputs=["a", "b"])
    node = first.producer()
    assert (node.domain, node.op_type, first.name, second.name) == ("other", "Other", "a", "b")
    assert (node.inputs[1], node.attributes.get_float("scale"), "unused" in node.attributes) == (None, 0.5, False)


def test_branches_of_a_graph_have_names_that_no_other_value_has() -> None:
    graph = chain()
    op = OpBuilder.append(graph)

    def nested(op: OpBuilder) -> Value:
        return cond(op, condition, lambda op: op.Abs(1.0), lambda op: op.Neg(1.0), name="inner", dtype=FLOAT)

    condition = op.Greater(op.ReduceSum(graph.inputs[0], keepdims=0), 0.0)
    chosen = cond(op, condition, nested, lambda op: op.Exp(1.0), name="outer", dtype=FLOAT)
    graph.outputs.append(op.Add(graph.outputs[0], chosen))
    names = [value.name for node in graph.all_nodes() for value in node.outputs]
    assert len(names) == len(set(names))
    assert {"inner", "outer", "outer_else_Exp_1"} <= set(names)
    proto = ir.to_proto(ir.Model(graph, ir_version=10))
    answer = ReferenceEvaluator(proto).run(None, {"x": np.float32([1, 2, 3])})[1]
    assert answer.tolist() == [2, 3, 4]
