"""Attention by clipped distance: its definition by hand, and bodies whose numbers are shared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hdplugins.attention.operator import BodyVariant
from support.attention_graphs import chain_of
from support.attention_layers import token_kinds
from support.comparators import assert_close
from support.exact_answers import answer_of_body, exact_answer
from support.function_bodies import new_session, run
from support.operators.distance import NODES, Clipped, inputs_of

FAR = Clipped(by_query=True, values=True, reach=9)

each_variant = pytest.mark.parametrize("variant", BodyVariant, ids=lambda variant: variant.value)
each_node = pytest.mark.parametrize("node", NODES, ids=str)


@each_node
def test_the_definition_is_a_softmax_over_all_real_keys(node: Clipped) -> None:
    node = replace(node, dtype="float64", reach=min(node.reach, 9))
    for padding, tokens in (("right", 25), ("holes", 13)):
        inputs = inputs_of(node, token_kinds(padding, tokens))
        got = exact_answer(node, inputs)
        for batch, i, head in np.ndindex(got.shape[:3]):
            seen = [j for j in range(tokens) if inputs["key_mask"][batch, j]]
            rows = [max(-node.reach, min(node.reach, j - i)) + node.reach for j in seen]
            numbers = inputs["scores_by_distance"]
            own = numbers[batch if node.by_query else 0, i if node.by_query else 0, head, rows]
            scores = inputs["query"][batch, i, head] @ inputs["key"][batch, seen, head].T * node.head_dim**-0.5 + own
            weights = np.exp(scores - scores.max())
            values = inputs["value"][batch, seen, head]
            if node.values:
                values = values + inputs["values_by_distance"][rows]
            assert_close(got[batch, i, head], weights @ values / weights.sum(), atol=1e-12)


@each_variant
def test_what_is_shared_may_be_given_to_each_text_and_query(variant: BodyVariant) -> None:
    """All four forms of the numbers give one answer."""
    shared, by_query = replace(FAR, by_query=False), FAR
    for tokens in (1, 5, 131):
        inputs = inputs_of(shared, token_kinds("right", tokens))
        right = answer_of_body(shared, variant, inputs)
        for texts, queries in ((3, 1), (1, tokens), (3, tokens)):
            shape = (texts, queries, shared.heads, 2 * shared.reach + 1)
            given = inputs | {"scores_by_distance": np.broadcast_to(inputs["scores_by_distance"], shape).copy()}
            model = chain_of([by_query], variant)
            for value in model.graph.input:
                if value.name == "scores_by_distance":
                    value.type.tensor_type.shape.dim[0].dim_param = "number_texts"
                    value.type.tensor_type.shape.dim[1].dim_param = "number_queries"
            np.testing.assert_array_equal(run(new_session(model), given), right)
