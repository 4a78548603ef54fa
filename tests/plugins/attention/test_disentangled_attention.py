"""Disentangled attention: its definition by hand; its bodies are among those of test_bodies.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.attention_layers import token_kinds
from support.comparators import assert_close
from support.exact_answers import exact_answer
from support.operators.disentangled import NODES, Disentangled, inputs_of

each_node = pytest.mark.parametrize("node", NODES, ids=str)


@each_node
def test_the_definition_is_a_softmax_of_three_products(node: Disentangled) -> None:
    node = replace(node, dtype="float64", reach=min(node.reach, 9))
    (row_of_distance,) = node.constants.values()
    for padding, tokens in (("right", 25), ("holes", 13)):
        inputs = inputs_of(node, token_kinds(padding, tokens))
        got = exact_answer(node, inputs)
        for batch, i, head in np.ndindex(got.shape[:3]):
            seen = [j for j in range(tokens) if inputs["key_mask"][batch, j]]
            rows = row_of_distance[[max(-node.reach, min(node.reach, j - i)) + node.reach for j in seen]]
            query, keys = inputs["query"][batch, i, head], inputs["key"][batch, seen, head]
            scores = keys @ query + inputs["position_keys"][head, rows] @ query
            scores += (inputs["position_queries"][head, rows] * keys).sum(1)
            scores *= node.head_dim**-0.5
            weights = np.exp(scores - scores.max())
            values = inputs["value"][batch, seen, head]
            assert_close(got[batch, i, head], weights @ values / weights.sum(), atol=1e-12)
