"""Relative attention: its definition by hand, and its ONNX bodies against the definition around every block."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdplugins.attention.operator import BlockOrder
from hdplugins.attention.relative.operator import pairs
from support.attention_graphs import chain_of
from support.attention_layers import PADDINGS
from support.comparators import assert_close, named_case
from support.exact_answers import answer_of_body, assert_as_accurate_as, error_of_pytorch, exact_answer
from support.function_bodies import new_session, operators_of, run, unnoticed_mistakes
from support.operators.relative import (
    MEMORIES,
    NODES,
    Relative,
    inputs_of,
    key_kinds,
    wrong_nodes,
)

BLOCK = 128
LENGTHS = (1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 211, 2 * BLOCK, 2 * BLOCK + 1)

each_order = pytest.mark.parametrize("order", BlockOrder, ids=lambda order: order.value)
each_node = pytest.mark.parametrize("node", NODES, ids=str)


@functools.cache
def usual_error_of_pytorch(node: Relative) -> float:
    """The largest error in a text that is long enough to show the effect of rounding."""
    return error_of_pytorch(node, inputs_of(node, key_kinds("none", 211, 7), 211))


def assert_right(node: Relative, got: np.ndarray, inputs: Mapping[str, np.ndarray]) -> None:
    # A few values are not enough to show the effect of rounding.
    assert_as_accurate_as(usual_error_of_pytorch(node), node, got, inputs)
    tokens = got.shape[2]
    assert (got.swapaxes(1, 2)[inputs["key_kind"][:, -tokens:] == 0] == 0).all()


# The definition.


@each_node
def test_the_definition_is_a_softmax_over_the_keys_in_view(node: Relative) -> None:
    tokens, memory = 13, 5
    for padding in ("right", "holes"):
        kinds = key_kinds(padding, tokens, memory)
        inputs = inputs_of(replace(node, dtype="float64"), kinds, tokens)
        got = exact_answer(node, inputs)
        for batch, head, i in np.ndindex(got.shape[:3]):
            query, expected = inputs["query"][batch, head, i], np.zeros(node.head_dim)
            seen = node.keys_by_hand(kinds[batch], tokens, i)
            if seen:
                to_key = (query + inputs["content_bias"][head]) @ inputs["key"][batch, head, seen].T
                rows = inputs["positions"][head][[tokens - 1 - i + key for key in seen]]
                scores = to_key + (query + inputs["position_bias"][head]) @ rows.T
                if node.segments:
                    other = kinds[batch, seen] != kinds[batch, memory + i]
                    scores += other * inputs["segment_scores"][batch, head, i]
                weights = np.exp((scores - scores.max()) * node.head_dim**-0.5)
                expected = weights @ inputs["value"][batch, head, seen] / weights.sum()
            assert_close(got[batch, head, i], expected, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": 2}, "causal is 2; it must be 0 or 1"),
        ({"reach": -1}, "reach is -1; it must be 0 or more"),
        ({"key": torch.zeros(3, 2, 4, 32)}, "There are 4 keys for 9 tokens"),
        ({"positions": torch.zeros(2, 19, 32)}, "positions has 19 distances; 20 are needed"),
    ],
    ids=str,
)
def test_what_the_operator_does_not_define_is_refused(changes: dict[str, Any], message: str) -> None:
    inputs = inputs_of(NODES[0], key_kinds("none", 9, 3), 9)
    with pytest.raises(ValueError, match=message):
        exact_answer(NODES[0], inputs, torch.float32, **changes)


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(1, 12), memory=st.integers(0, 9), causal=st.integers(0, 1), reach=st.integers(0, 25))
def test_the_count_of_pairs_includes_those_with_a_memory(tokens: int, memory: int, causal: int, reach: int) -> None:
    node = Relative(causal=causal, reach=reach)
    counted = pairs({**node.node_attributes, "memory": memory}, tokens=tokens, heads=node.heads)
    assert counted == node.looked_at(tokens, memory=memory)


# The bodies against the definition.


@each_node
def test_a_body_matches_the_definition_at_every_length(node: Relative) -> None:
    """Paddings, batches, memories and positions that are too many alternate."""
    paddings, batches = itertools.cycle(PADDINGS), itertools.cycle((3, 1, 3))
    place = NODES.index(node)
    for number, tokens in enumerate(LENGTHS):
        for memory in (MEMORIES[(number + place) % 4], MEMORIES[(number + place + 2) % 4]):
            padding, batch = next(paddings), next(batches)
            inputs = inputs_of(node, key_kinds(padding, tokens, memory, batch=batch), tokens, spare=number % 4)
            for order in BlockOrder:
                with named_case(order.value, tokens, memory, padding, batch):
                    assert_right(node, answer_of_body(node, order, inputs), inputs)


@each_node
def test_every_padding_meets_every_batch_and_memory(node: Relative) -> None:
    """Each node has half of the batches."""
    for number, (padding, memory) in enumerate(itertools.product(PADDINGS, (0, 7)), NODES.index(node)):
        batch = (1, 3)[(number + number // 2) % 2]
        inputs = inputs_of(node, key_kinds(padding, 131, memory, batch=batch), 131)
        for order in BlockOrder:
            with named_case(order.value, padding, memory, batch):
                assert_right(node, answer_of_body(node, order, inputs), inputs)


@each_order
def test_a_memory_far_longer_than_the_text(order: BlockOrder) -> None:
    for tokens in (1, 3):
        inputs = inputs_of(NODES[0], key_kinds("none", tokens, 1021), tokens)
        assert_right(NODES[0], answer_of_body(NODES[0], order, inputs), inputs)


@each_order
@pytest.mark.parametrize("node", [NODES[0], NODES[3]], ids=str)
def test_what_is_not_seen_does_not_change_the_answer(node: Relative, order: BlockOrder) -> None:
    """Padding of the text and the part of the memory that is not there yet."""
    kinds = key_kinds("holes", 97, 40)
    inputs = inputs_of(node, kinds, 97)
    before = answer_of_body(node, order, inputs)
    for name in ("key", "value"):
        inputs[name].swapaxes(1, 2)[kinds == 0] = 50.0
    np.testing.assert_array_equal(before, answer_of_body(node, order, inputs))


@each_order
def test_large_scores_overflow_in_no_dtype(order: BlockOrder) -> None:
    """Scaled after the product, 60 x 60 x 64 would be outside float16."""
    node = Relative(head_dim=64, dtype="float16", segments=False)
    inputs = inputs_of(node, key_kinds("right", 40, 9), 40)
    for name in ("query", "key", "positions"):
        inputs[name][:] = 60.0
    # All scores of a query are equal: what is left is the rounding of weights and values. Measured 2.4e-4.
    assert_close(answer_of_body(node, order, inputs), exact_answer(node, inputs), atol=5e-4)


@each_order
def test_nodes_that_differ_share_a_model(order: BlockOrder) -> None:
    nodes = (NODES[0], replace(NODES[0], reach=9), NODES[0])
    model, inputs = chain_of(nodes, order), inputs_of(NODES[0], key_kinds("right", 131, 7), 131)
    exact = {name: array.astype(np.float64) if name != "key_kind" else array for name, array in inputs.items()}
    for node in nodes:
        exact["query"] = exact_answer(node, exact)
    assert len(model.functions) == 2
    # Measured 6.6e-6; values reach 4.
    assert_close(run(new_session(model), inputs), exact["query"], atol=1.3e-5)


# Wrong answers are found.


@each_node
def test_the_measure_of_bodies_refuses_wrong_answers(node: Relative) -> None:
    inputs = inputs_of(node, key_kinds("right", 211, 7), 211, spare=211)
    assert_right(node, exact_answer(node, inputs).astype(node.dtype), inputs)
    wrong = [exact_answer(other, inputs) for other in wrong_nodes(node)]
    wrong.append(exact_answer(node, inputs, scale=1.01 * node.head_dim**-0.5))
    shifts = {"positions": np.roll(inputs["positions"], 1, axis=1), "content_bias": inputs["position_bias"]}
    wrong += [exact_answer(node, inputs | {name: array}) for name, array in shifts.items()]
    wrong.append(exact_answer(node, inputs | {"key_kind": np.maximum(inputs["key_kind"], 1)}))
    for answer in wrong:
        with pytest.raises(AssertionError):
            assert_right(node, answer.astype(node.dtype), inputs)


HARMLESS = {
    BlockOrder.PARALLEL: {
        "Sub 0": "the number of blocks is rounded up further: a block of padding is dropped",
        "Sub 4": "more rows than needed follow the positions",
    },
    BlockOrder.SEQUENTIAL: {"Min 0": "one block holds the whole text", "Sub 0": "as in parallel", "Sub 4": "likewise"},
}
"""Order -> mistakes that change no answer, and the reason."""


@each_order
def test_a_wrong_body_is_found(order: BlockOrder) -> None:
    inputs = inputs_of(NODES[3], key_kinds("right", 301, 7), 301)
    unnoticed = unnoticed_mistakes(
        chain_of([NODES[3]], order), lambda session: assert_right(NODES[3], run(session, inputs), inputs)
    )
    assert unnoticed == [*HARMLESS[order]]


# The nodes of a body.


@each_order
def test_a_body_is_of_standard_operators_and_builds_each_score_matrix_once(order: BlockOrder) -> None:
    forbidden = {"NonZero", "ScatterND", "ScatterElements", "TopK", "EyeLike", "Compress", "Unique"}
    for node in NODES:
        counts = operators_of(node.body(order))
        assert not forbidden & set(counts), str(node)
        assert counts["MatMul"] + counts["Gemm"] == 3, str(node)
        assert (counts["Softmax"], counts["Scan"]) == (1, 1 + (order is BlockOrder.SEQUENTIAL)), str(node)


@each_order
def test_bodies_that_differ_have_names_that_differ(order: BlockOrder) -> None:
    nodes = [
        Relative(causal=causal, reach=reach, segments=segments)
        for causal, reach, segments in itertools.product((0, 1), (0, 1, 9), (False, True))
    ]
    bodies = {node.body(order).name: node.body(order).SerializeToString() for node in nodes}
    assert len(bodies) == len(set(bodies.values())) == len(nodes)
    assert Relative(causal=1, reach=9).name == "RelativeAttention_causal_reach9_segments"


@pytest.mark.parametrize(("changes", "message"), [({"causal": 2}, "causal is 2"), ({"reach": -1}, "reach is -1")])
def test_a_body_of_nonsense_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(NODES[0], **changes).body()
