"""Attention by clipped distance: its definition by hand, and its ONNX bodies against the definition."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hdplugins.attention.operator import BlockOrder
from support.attention_graphs import chain_of
from support.attention_layers import PADDINGS, token_kinds
from support.comparators import assert_close, named_case
from support.exact_answers import answer_of_body, assert_as_accurate_as, error_of_pytorch, exact_answer
from support.function_bodies import new_session, operators_of, run, unnoticed_mistakes
from support.operators.distance import NODES, Clipped, inputs_of, wrong_inputs

BLOCK = 128
LENGTHS = (1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 211, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK + 7)
FAR = Clipped(by_query=True, values=True, reach=9)

each_order = pytest.mark.parametrize("order", BlockOrder, ids=lambda order: order.value)
each_node = pytest.mark.parametrize("node", NODES, ids=str)


@functools.cache
def usual_error_of_pytorch(node: Clipped) -> float:
    """The largest error in a text that is long enough to show the effect of rounding."""
    return error_of_pytorch(node, inputs_of(node, token_kinds("none", 211)))


def assert_right(node: Clipped, got: np.ndarray, inputs: Mapping[str, np.ndarray]) -> None:
    # A few values are not enough to show the effect of rounding.
    assert_as_accurate_as(usual_error_of_pytorch(node), node, got, inputs)
    assert (got[~inputs["key_mask"].any(axis=1)] == 0).all()


def lengths_of(node: Clipped) -> list[int]:
    """Around the lengths from which distances are clipped, those of a band, and blocks: every second one for a node."""
    edges = {node.reach + 1, 2 * node.reach + 1, node.reach + BLOCK, 2 * node.reach + BLOCK}
    around = {edge + shift for edge in edges for shift in (-1, 0, 1)}
    return sorted({*LENGTHS[NODES.index(node) % 2 :: 2], *around} - {0})


# The definition.


@each_node
def test_the_definition_is_a_softmax_over_all_real_keys(node: Clipped) -> None:
    node = replace(node, dtype="float64", reach=min(node.reach, 9))
    for padding, tokens in (("right", 25), ("holes", 13)):
        inputs = inputs_of(node, token_kinds(padding, tokens))
        got = exact_answer(node, inputs)
        for batch, head, i in np.ndindex(got.shape[:3]):
            seen = [j for j in range(tokens) if inputs["key_mask"][batch, j]]
            rows = [max(-node.reach, min(node.reach, j - i)) + node.reach for j in seen]
            numbers = inputs["scores_by_distance"]
            own = numbers[batch if node.by_query else 0, head, i if node.by_query else 0, rows]
            scores = inputs["query"][batch, head, i] @ inputs["key"][batch, head, seen].T * node.head_dim**-0.5 + own
            weights = np.exp(scores - scores.max())
            values = inputs["value"][batch, head, seen]
            if node.values:
                values = values + inputs["values_by_distance"][rows]
            assert_close(got[batch, head, i], weights @ values / weights.sum(), atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reach": 0}, "reach is 0; it must be 1 or more"),
        ({"reach": 8}, "scores_by_distance has 19 distances; a reach of 8 has 17"),
        ({"values_by_distance": torch.zeros(17, 32)}, "values_by_distance has 17 distances; a reach of 9 has 19"),
    ],
    ids=str,
)
def test_what_the_operator_does_not_define_is_refused(changes: dict[str, Any], message: str) -> None:
    inputs = inputs_of(FAR, token_kinds("none", 11))
    with pytest.raises(ValueError, match=message):
        exact_answer(FAR, inputs, torch.float32, **changes)


# The bodies against the definition.


@each_node
def test_a_body_matches_the_definition_at_every_length(node: Clipped) -> None:
    """Paddings and batches alternate."""
    paddings, batches = itertools.cycle(PADDINGS), itertools.cycle((3, 1, 3))
    for tokens in lengths_of(node):
        padding, batch = next(paddings), next(batches)
        inputs = inputs_of(node, token_kinds(padding, tokens, batch=batch))
        for order in BlockOrder:
            with named_case(order.value, tokens, padding, batch):
                assert_right(node, answer_of_body(node, order, inputs), inputs)


@each_node
def test_every_padding_meets_every_batch(node: Clipped) -> None:
    """Each node has half of the pairs."""
    for number, padding in enumerate(PADDINGS, NODES.index(node)):
        batch = (1, 3)[number % 2]
        inputs = inputs_of(node, token_kinds(padding, 131, batch=batch))
        for order in BlockOrder:
            with named_case(order.value, padding, batch):
                assert_right(node, answer_of_body(node, order, inputs), inputs)


@each_order
def test_what_is_shared_may_be_given_to_each_text_and_query(order: BlockOrder) -> None:
    """All four forms of the numbers give one answer."""
    shared, by_query = replace(FAR, by_query=False), FAR
    for tokens in (1, 5, 131):
        inputs = inputs_of(shared, token_kinds("right", tokens))
        right = answer_of_body(shared, order, inputs)
        for texts, queries in ((3, 1), (1, tokens), (3, tokens)):
            shape = (texts, shared.heads, queries, 2 * shared.reach + 1)
            given = inputs | {"scores_by_distance": np.broadcast_to(inputs["scores_by_distance"], shape).copy()}
            model = chain_of([by_query], order)
            for value in model.graph.input:
                if value.name == "scores_by_distance":
                    value.type.tensor_type.shape.dim[0].dim_param = "number_texts"
                    value.type.tensor_type.shape.dim[2].dim_param = "number_queries"
            np.testing.assert_array_equal(run(new_session(model), given), right)


@each_order
@pytest.mark.parametrize("node", [NODES[0], FAR], ids=str)
def test_content_of_padding_does_not_change_the_answer(node: Clipped, order: BlockOrder) -> None:
    kinds = token_kinds("holes", 297)
    inputs = inputs_of(node, kinds)
    before = answer_of_body(node, order, inputs)
    for name in ("key", "value"):
        inputs[name].swapaxes(1, 2)[kinds == 0] = 50.0
    np.testing.assert_array_equal(before, answer_of_body(node, order, inputs))


@each_order
def test_large_scores_overflow_in_no_dtype(order: BlockOrder) -> None:
    """Scaled after the product, 60 x 60 x 64 would be outside float16."""
    node = Clipped(head_dim=64, dtype="float16")
    inputs = inputs_of(node, token_kinds("right", 140))
    for name in ("query", "key"):
        inputs[name][:] = 60.0
    # Measured 4.7e-4, the rounding of weights and values.
    assert_close(answer_of_body(node, order, inputs), exact_answer(node, inputs), atol=1e-3)


@each_order
def test_nodes_that_differ_share_a_model(order: BlockOrder) -> None:
    nodes = (FAR, replace(FAR, values=False), FAR)
    model, inputs = chain_of(nodes, order), inputs_of(FAR, token_kinds("right", 131))
    exact = {name: array if name == "key_mask" else array.astype(np.float64) for name, array in inputs.items()}
    for node in nodes:
        exact["query"] = exact_answer(node, exact)
    assert len(model.functions) == 2
    # Measured 3.1e-6; values reach 6.1.
    assert_close(run(new_session(model), inputs), exact["query"], atol=6e-6)


# Wrong answers are found.


@each_node
def test_the_measure_of_bodies_refuses_wrong_answers(node: Clipped) -> None:
    inputs = inputs_of(node, token_kinds("right", 301))
    assert_right(node, exact_answer(node, inputs).astype(node.dtype), inputs)
    wrong = [exact_answer(node, changed) for changed in wrong_inputs(node, inputs)]
    wrong.append(exact_answer(node, inputs, scale=1.01 * node.head_dim**-0.5))
    for number, answer in enumerate(wrong):
        with named_case(number), pytest.raises(AssertionError):
            assert_right(node, answer.astype(node.dtype), inputs)


HARMLESS = {
    BlockOrder.PARALLEL: {"Sub 0": "the number of blocks is rounded up further: a block of padding is dropped"},
    BlockOrder.SEQUENTIAL: {
        "Min 0": "one block holds the whole text",
        "Sub 0": "as in parallel",
        "Sub 5": "only numbers that all queries share would show it",
        "Sub 7": "only numbers that all texts share would show it",
        "Sub 8": "the last block gets more rows of numbers than it has queries",
    },
}
"""Order -> mistakes that change no answer, and the reason."""


@each_order
def test_a_wrong_body_is_found(order: BlockOrder) -> None:
    inputs = inputs_of(FAR, token_kinds("right", 301))
    # Without a single real key, the third text must be 0.
    inputs["key_mask"][2] = False
    unnoticed = unnoticed_mistakes(
        chain_of([FAR], order), lambda session: assert_right(FAR, run(session, inputs), inputs)
    )
    assert unnoticed == [*HARMLESS[order]]


# The nodes of a body.


@each_order
def test_a_body_is_of_standard_operators_and_builds_each_score_matrix_once(order: BlockOrder) -> None:
    forbidden = {"NonZero", "ScatterND", "ScatterElements", "GatherElements", "TopK", "EyeLike", "Compress", "Unique"}
    for node in NODES:
        counts = operators_of(node.body(order))
        assert not forbidden & set(counts), str(node)
        assert counts["MatMul"] + counts["Gemm"] == 2 + node.values, str(node)
        assert (counts["Softmax"], counts["Scan"]) == (1, 1 + (order is BlockOrder.SEQUENTIAL)), str(node)


def test_bodies_that_differ_have_names_that_differ() -> None:
    """Bodies read the reach from the node."""
    nodes = [Clipped(reach=reach, values=values) for reach in (1, 9) for values in (False, True)]
    bodies = {node.body().name: node.body().SerializeToString() for node in nodes}
    assert sorted(bodies) == ["ClippedDistanceAttention", "ClippedDistanceAttention_values"]
    assert len(set(bodies.values())) == 2


def test_a_body_of_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="reach is 0; it must be 1 or more"):
        replace(FAR, reach=0).body()
