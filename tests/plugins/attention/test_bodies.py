"""The bodies of operators by distance, each against its operator's definition; `BODIES` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from hdplugins.attention.operator import BodyVariant
from support.attention_graphs import chain_of
from support.attention_layers import BodyDescription, Layer
from support.comparators import assert_close, named_case
from support.described_operators import BODIES, NODES
from support.exact_answers import answer_of_body, assert_right, exact_answer
from support.function_bodies import new_session, operators_of, run, unnoticed_mistakes

FORBIDDEN = {"NonZero", "ScatterND", "ScatterElements", "TopK", "EyeLike", "OneHot", "Compress", "Unique"}
"""Operators that a runtime lacks, or that it has in memory or time beyond the operator's."""

each_variant = pytest.mark.parametrize("variant", BodyVariant, ids=lambda variant: variant.value)
each_operator = pytest.mark.parametrize("described", BODIES.values(), ids=BODIES)
each_node = pytest.mark.parametrize(
    ("described", "node"), [pytest.param(BODIES[name], node, id=str(node)) for name in BODIES for node in NODES[name]]
)


def assert_cases(node: Layer, cases: Any) -> None:
    for name, inputs in cases:
        for variant in BodyVariant:
            with named_case(variant.value, *name):
                assert_right(node, answer_of_body(node, variant, inputs), inputs)


@each_node
def test_a_body_matches_the_definition_at_every_length(described: BodyDescription, node: Layer) -> None:
    """Paddings, batches, and whatever else a node has alternate."""
    assert_cases(node, described.lengths(node))


@each_node
def test_every_padding_meets_every_batch(described: BodyDescription, node: Layer) -> None:
    assert_cases(node, described.paddings(node))


@each_variant
@each_operator
def test_what_is_not_seen_does_not_change_the_answer(described: BodyDescription, variant: BodyVariant) -> None:
    nodes, inputs_of = described.unseen
    for node in nodes:
        before, after = inputs_of(node)
        np.testing.assert_array_equal(answer_of_body(node, variant, before), answer_of_body(node, variant, after))


@each_variant
@pytest.mark.parametrize("described", [pytest.param(each, id=name) for name, each in BODIES.items() if each.large])
def test_large_scores_overflow_in_no_dtype(described: BodyDescription, variant: BodyVariant) -> None:
    """Scaled after the product, 60 x 60 x 64 would be outside float16."""
    assert described.large is not None
    node, inputs_of, atol = described.large
    inputs = inputs_of(node)
    assert_close(answer_of_body(node, variant, inputs), exact_answer(node, inputs), atol=atol)


@each_variant
@each_operator
def test_nodes_that_differ_share_a_model(described: BodyDescription, variant: BodyVariant) -> None:
    nodes, inputs_of, bodies, atol = described.chain
    model, inputs = chain_of(nodes, variant), inputs_of(nodes[0])
    assert len(model.functions) == bodies
    exact = {name: array.astype(np.float64) if array.dtype.kind == "f" else array for name, array in inputs.items()}
    for node in nodes:
        exact["query"] = exact_answer(node, exact)
    assert_close(run(new_session(model), inputs), exact["query"], atol=atol)


@each_node
def test_the_measure_of_bodies_refuses_wrong_answers(described: BodyDescription, node: Layer) -> None:
    inputs, wrong = described.wrong(node)
    assert_right(node, exact_answer(node, inputs).astype(node.dtype), inputs)
    for number, (other, given, attributes) in enumerate(wrong):
        with named_case(number), pytest.raises(AssertionError):
            assert_right(node, exact_answer(other, given, **attributes).astype(node.dtype), inputs)


@each_variant
@each_operator
def test_a_wrong_body_is_found(described: BodyDescription, variant: BodyVariant) -> None:
    node, inputs_of, harmless = described.mistaken
    inputs = inputs_of(node)
    unnoticed = unnoticed_mistakes(
        chain_of([node], variant), lambda session: assert_right(node, run(session, inputs), inputs)
    )
    assert unnoticed == [*harmless[variant]]


@each_variant
@each_node
def test_a_body_is_of_standard_operators_and_computes_and_turns_nothing_twice(
    described: BodyDescription, node: Layer, variant: BodyVariant
) -> None:
    counts = operators_of(node.body(variant))
    assert not FORBIDDEN & set(counts)
    counts["MatMul"] += counts["Gemm"]
    wanted: Mapping[str, int] = {"Softmax": 1, **described.counts(node, variant)}
    assert {name: counts[name] for name in wanted} == wanted


@each_variant
@each_operator
def test_bodies_that_differ_have_names_that_differ(described: BodyDescription, variant: BodyVariant) -> None:
    assert {node: node.name for node in described.names} == described.names
    same = {(body.name, body.SerializeToString()) for body in (node.body(variant) for node in described.names)}
    assert len(same) == len({name for name, _ in same}) == len({content for _, content in same})
    bodies = {node.body(variant).name: node.body(variant).SerializeToString() for node in described.distinct}
    assert len(bodies) == len(set(bodies.values())) == len(described.distinct)


@each_operator
def test_what_the_operator_does_not_define_is_refused(described: BodyDescription) -> None:
    node, inputs_of, refused = described.undefined
    inputs = inputs_of(node)
    for changes, message in refused:
        with named_case(changes), pytest.raises(ValueError, match=message):
            exact_answer(node, inputs, torch.float32, **changes)


@each_operator
def test_a_body_of_nonsense_is_refused(described: BodyDescription) -> None:
    for node, message in described.bodiless:
        with named_case(node), pytest.raises(ValueError, match=message):
            node.body()
