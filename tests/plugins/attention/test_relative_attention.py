"""Relative attention: its definition by hand, and a body with a long memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdplugins.attention.operator import BodyVariant
from hdplugins.attention.relative.operator import pairs
from support.comparators import assert_close
from support.exact_answers import answer_of_body, assert_right, exact_answer
from support.operators.relative import (
    NODES,
    Relative,
    inputs_of,
    key_kinds,
)

each_variant = pytest.mark.parametrize("variant", BodyVariant, ids=lambda variant: variant.value)
each_node = pytest.mark.parametrize("node", NODES, ids=str)


@each_node
def test_the_definition_is_a_softmax_over_the_keys_in_view(node: Relative) -> None:
    tokens, memory = 13, 5
    for padding in ("right", "holes"):
        kinds = key_kinds(padding, tokens, memory)
        inputs = inputs_of(replace(node, dtype="float64"), kinds, tokens)
        got = exact_answer(node, inputs)
        for batch, i, head in np.ndindex(got.shape[:3]):
            query, expected = inputs["query"][batch, i, head], np.zeros(node.head_dim)
            seen = node.keys_by_hand(kinds[batch], tokens, i)
            if seen:
                to_key = (query + inputs["content_bias"][head]) @ inputs["key"][batch, seen, head].T
                rows = inputs["positions"][head][[tokens - 1 - i + key for key in seen]]
                scores = to_key + (query + inputs["position_bias"][head]) @ rows.T
                if node.segments:
                    other = kinds[batch, seen] != kinds[batch, memory + i]
                    scores += other * inputs["segment_scores"][batch, i, head]
                weights = np.exp((scores - scores.max()) * node.head_dim**-0.5)
                expected = weights @ inputs["value"][batch, seen, head] / weights.sum()
            assert_close(got[batch, i, head], expected, atol=1e-12)


@settings(max_examples=60)
@given(tokens=st.integers(1, 12), memory=st.integers(0, 9), causal=st.integers(0, 1), reach=st.integers(0, 25))
def test_the_count_of_pairs_includes_those_with_a_memory(tokens: int, memory: int, causal: int, reach: int) -> None:
    node = Relative(causal=causal, reach=reach)
    counted = pairs({**node.node_attributes, "memory": memory}, tokens=tokens, heads=node.heads)
    assert counted == node.looked_at(tokens, memory=memory)


@each_variant
def test_a_memory_far_longer_than_the_text(variant: BodyVariant) -> None:
    for tokens in (1, 3):
        inputs = inputs_of(NODES[0], key_kinds("none", tokens, 1021), tokens)
        assert_right(NODES[0], answer_of_body(NODES[0], variant, inputs), inputs)
