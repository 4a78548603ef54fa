"""Disentangled attention: its definition by hand, and its ONNX bodies against the definition."""

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
from support.operators.disentangled import NODES, Disentangled, inputs_of, wrong_inputs

BLOCK = 128
LENGTHS = (1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 211, 2 * BLOCK + 1, 3 * BLOCK + 7)

each_order = pytest.mark.parametrize("order", BlockOrder, ids=lambda order: order.value)
each_node = pytest.mark.parametrize("node", NODES, ids=str)


@functools.cache
def usual_error_of_pytorch(node: Disentangled) -> float:
    """The largest error in a text that is long enough to show the effect of rounding."""
    return error_of_pytorch(node, inputs_of(node, token_kinds("none", 211)))


def assert_right(node: Disentangled, got: np.ndarray, inputs: Mapping[str, np.ndarray]) -> None:
    # A few values are not enough to show the effect of rounding.
    assert_as_accurate_as(usual_error_of_pytorch(node), node, got, inputs)
    assert (got[~inputs["key_mask"].any(axis=1)] == 0).all()


def lengths_of(node: Disentangled) -> list[int]:
    """Around each block, around the reach, and around the band of the keys within it."""
    edges = {node.reach, node.reach + BLOCK, 2 * node.reach + BLOCK}
    return sorted({*LENGTHS, *(edge + shift for edge in edges for shift in (-1, 0, 1, 2))} - {0})


# The definition.


@each_node
def test_the_definition_is_a_softmax_of_three_products(node: Disentangled) -> None:
    node = replace(node, dtype="float64", reach=min(node.reach, 9))
    (row_of_distance,) = node.constants.values()
    for padding, tokens in (("right", 25), ("holes", 13)):
        inputs = inputs_of(node, token_kinds(padding, tokens))
        got = exact_answer(node, inputs)
        for batch, head, i in np.ndindex(got.shape[:3]):
            seen = [j for j in range(tokens) if inputs["key_mask"][batch, j]]
            rows = row_of_distance[[max(-node.reach, min(node.reach, j - i)) + node.reach for j in seen]]
            query, keys = inputs["query"][batch, head, i], inputs["key"][batch, head, seen]
            scores = keys @ query + inputs["position_keys"][head, rows] @ query
            scores += (inputs["position_queries"][head, rows] * keys).sum(1)
            scores *= node.head_dim**-0.5
            weights = np.exp(scores - scores.max())
            values = inputs["value"][batch, head, seen]
            assert_close(got[batch, head, i], weights @ values / weights.sum(), atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reach": 0}, "reach is 0; it must be 1 or more"),
        ({"reach": 8}, "row_of_distance has 19 distances; a reach of 8 has 17"),
        ({"position_keys": torch.zeros(2, 11, 32)}, r"\[2, 11, 32\] and \[2, 12, 32\]; both are \[heads, rows"),
    ],
    ids=str,
)
def test_what_the_operator_does_not_define_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exact_answer(NODES[0], inputs_of(NODES[0], token_kinds("none", 11)), torch.float32, **changes)


# The bodies against the definition.


@each_node
def test_a_body_matches_the_definition_at_every_length(node: Disentangled) -> None:
    """Paddings and batches alternate."""
    paddings, batches = itertools.cycle(PADDINGS), itertools.cycle((3, 1, 3))
    for tokens in lengths_of(node):
        padding, batch = next(paddings), next(batches)
        inputs = inputs_of(node, token_kinds(padding, tokens, batch=batch))
        for order in BlockOrder:
            with named_case(order.value, tokens, padding, batch):
                assert_right(node, answer_of_body(node, order, inputs), inputs)


def test_every_padding_meets_every_batch() -> None:
    for padding, batch in itertools.product(PADDINGS, (1, 3)):
        inputs = inputs_of(NODES[0], token_kinds(padding, 131, batch=batch))
        for order in BlockOrder:
            with named_case(order.value, padding, batch):
                assert_right(NODES[0], answer_of_body(NODES[0], order, inputs), inputs)


@each_order
def test_content_of_padding_does_not_change_the_answer(order: BlockOrder) -> None:
    kinds = token_kinds("holes", 297)
    inputs = inputs_of(NODES[0], kinds)
    before = answer_of_body(NODES[0], order, inputs)
    for name in ("key", "value"):
        inputs[name].swapaxes(1, 2)[kinds == 0] = 50.0
    np.testing.assert_array_equal(before, answer_of_body(NODES[0], order, inputs))


@each_order
def test_large_scores_overflow_in_no_dtype(order: BlockOrder) -> None:
    """Scaled after the product, 60 x 60 x 64 would be outside float16."""
    node = Disentangled(head_dim=64, dtype="float16")
    inputs = inputs_of(node, token_kinds("right", 140))
    for name in ("query", "key", "position_keys", "position_queries"):
        inputs[name][:] = 60.0
    # Measured 4.7e-4, the rounding of weights and values.
    assert_close(answer_of_body(node, order, inputs), exact_answer(node, inputs), atol=1e-3)


@each_order
def test_nodes_of_other_reaches_share_a_body(order: BlockOrder) -> None:
    nodes = (NODES[0], replace(NODES[0], reach=4), NODES[0])
    model, inputs = chain_of(nodes, order), inputs_of(NODES[0], token_kinds("right", 131))
    exact = {name: array if name == "key_mask" else array.astype(np.float64) for name, array in inputs.items()}
    for node in nodes:
        exact["query"] = exact_answer(node, exact)
    assert len(model.functions) == 1
    assert_close(run(new_session(model), inputs), exact["query"], atol=6e-6)


# Wrong answers are found.


@each_node
def test_the_measure_of_bodies_refuses_wrong_answers(node: Disentangled) -> None:
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
        "Min 1": "the band of a block reaches farther than it has to",
    },
}
"""Order -> mistakes that change no answer, and the reason."""


@each_order
def test_a_wrong_body_is_found(order: BlockOrder) -> None:
    node = NODES[0]
    inputs = inputs_of(node, token_kinds("right", 301))
    # Without a single real key, the third text must be 0.
    inputs["key_mask"][2] = False
    unnoticed = unnoticed_mistakes(
        chain_of([node], order), lambda session: assert_right(node, run(session, inputs), inputs)
    )
    assert unnoticed == [*HARMLESS[order]]


# The nodes of a body.


@each_order
def test_a_body_is_of_standard_operators_and_builds_each_score_matrix_once(order: BlockOrder) -> None:
    node = NODES[0]
    counts = operators_of(node.body(order))
    assert not {"NonZero", "ScatterND", "ScatterElements", "TopK", "EyeLike", "Compress", "Unique"} & set(counts)
    assert (counts["MatMul"] + counts["Gemm"], counts["GatherElements"], counts["Softmax"]) == (4, 2, 1)
    assert counts["Scan"] == 1 + (order is BlockOrder.SEQUENTIAL)


def test_a_body_of_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="reach is 0; it must be 1 or more"):
        replace(NODES[0], reach=0).body()
