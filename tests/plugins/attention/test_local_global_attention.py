"""Local attention with sides: its definition by hand and by Hugging Face, and a body with many sides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hdplugins.attention.local_global.operator import pairs
from hdplugins.attention.operator import BodyVariant
from support.attention_layers import token_kinds
from support.comparators import assert_close, named_case
from support.exact_answers import answer_of_body, assert_right, exact_answer
from support.operators.local_global import NODES, LocalGlobal, inputs_of

each_variant = pytest.mark.parametrize("variant", BodyVariant, ids=lambda variant: variant.value)
each_node = pytest.mark.parametrize("node", NODES, ids=str)


@each_node
def test_the_definition_is_a_softmax_over_the_tokens_and_sides_in_view(node: LocalGlobal) -> None:
    for tokens, padding in ((37, "right"), (37, "left"), (40, "holes"), (3, "none"), (48, "all")):
        mask = token_kinds(padding, tokens)
        inputs = inputs_of(replace(node, dtype="float64"), mask)
        got = exact_answer(node, inputs)
        for batch, i, head in np.ndindex(got.shape[:3]):
            near, sides, own = node.keys_by_hand(mask[batch], i)
            expected = np.zeros(node.head_dim)
            if near:
                keys, values = inputs["key"][batch, near, head], inputs["value"][batch, near, head]
                biases = [inputs["local_bias"][head, key - i + node.radius] for key in near]
                for side in sides:
                    keys = np.concatenate([keys, inputs["side_key"][batch, [side], head]])
                    values = np.concatenate([values, inputs["side_value"][batch, [side], head]])
                    distance = max(-node.reach, min(node.reach, side - own))
                    biases.append(inputs["side_bias"][head, distance + node.reach])
                scores = inputs["query"][batch, i, head] @ keys.T * node.head_dim**-0.5 + biases
                weights = np.exp(scores - scores.max())
                expected = weights @ values / weights.sum()
            assert_close(got[batch, i, head], expected, atol=1e-12)


@pytest.mark.parametrize(("tokens", "sides"), [(15, 0), (16, 1), (31, 1), (32, 2), (4096, 256)])
def test_a_side_is_counted_once_it_is_whole(tokens: int, sides: int) -> None:
    local, whole = (
        pairs(node.node_attributes, tokens=tokens, heads=3)
        for node in (LocalGlobal(radius=127), LocalGlobal(radius=127, side=16, reach=128))
    )
    assert whole == local + 3 * tokens * sides


def test_a_text_of_more_sides_than_the_reach_tells_apart() -> None:
    node = LocalGlobal(side=4, reach=128, radius=3, heads=1)
    for padding, tokens in (("none", 4 * 129), ("right", 1031), ("left", 1031)):
        inputs = inputs_of(node, token_kinds(padding, tokens, batch=1))
        for variant in BodyVariant:
            with named_case(variant.value, padding, tokens):
                assert_right(node, answer_of_body(node, variant, inputs), inputs)
