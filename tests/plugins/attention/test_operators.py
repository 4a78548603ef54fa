"""Every operator: the specification, and each implementation against the reference."""

from __future__ import annotations

import inspect

import onnx
import onnx_ir as ir
import pytest

from hdplugins import ONNX_DOMAIN, ONNX_OPSET, OPERATORS, Operator
from hdplugins.attention.function_bodies import function_of_node
from support.described_operators import NODES

each_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)


def body_of(operator: Operator, arity: int) -> ir.Function:
    """Of a described node with so many inputs, or else of the first one, given so many."""
    nodes = NODES[operator.name]
    node = next((node for node in nodes if operator.states + len(node.inputs) == arity), nodes[0])
    return function_of_node(operator, inputs=arity, attributes=node.node_attributes)


def arities(operator: Operator) -> list[int]:
    return sorted({len(operator.inputs) - len(operator.optional_inputs), len(operator.inputs)})


def test_there_are_operators_under_their_own_names() -> None:
    assert {name: operator.name for name, operator in OPERATORS.items()} == {name: name for name in OPERATORS}
    assert set(NODES) == set(OPERATORS)


@each_operator
def test_semantics_and_a_portable_body_are_the_least_an_operator_has(operator: Operator) -> None:
    for name in ("reference", "onnx_functions"):
        assert operator.has_implementation(name)
        assert operator.implementation(name).__name__ == f"{operator.package}.{name}"
    assert not operator.has_implementation("no_such_implementation")
    with pytest.raises(ModuleNotFoundError):
        operator.implementation("no_such_implementation")


@each_operator
def test_optional_inputs_are_the_last_ones(operator: Operator) -> None:
    optional = len(operator.optional_inputs)
    assert operator.version >= 1
    assert optional == 0 or operator.inputs[-optional:] == operator.optional_inputs


@each_operator
def test_the_reference_takes_the_inputs_and_attributes_of_the_specification(operator: Operator) -> None:
    parameters = inspect.signature(operator.definition).parameters
    positional = tuple(p.name for p in parameters.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY)
    keywords = tuple(p.name for p in parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY)
    assert (positional, keywords) == (operator.inputs, tuple(operator.attributes))


@each_operator
def test_the_body_has_the_signature_of_the_specification_and_standard_operators(operator: Operator) -> None:
    for arity in arities(operator):
        body = body_of(operator, arity)
        assert body.domain == ONNX_DOMAIN
        # The attributes that decide a body are part of the body's name, behind an underscore.
        assert body.name.partition("_")[0] == operator.name
        assert tuple(value.name for value in body.inputs) == operator.inputs[:arity]
        assert tuple(body.attributes) == tuple(operator.attributes)
        assert len(body.outputs) == 1
        assert body.opset_imports == {"": ONNX_OPSET}
        for node in body:
            assert onnx.defs.get_schema(node.op_type, ONNX_OPSET, node.domain).name == node.op_type


@each_operator
def test_an_arity_without_a_body_is_refused(operator: Operator) -> None:
    for arity in {*range(len(operator.inputs) + 2)} - {*arities(operator)}:
        with pytest.raises(ValueError, match=f"{operator.name} has .* inputs, not {arity}"):
            body_of(operator, arity)
