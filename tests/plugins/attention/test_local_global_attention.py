"""Local attention with sides: its definition by hand and by Hugging Face, and its bodies against the definition."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hdplugins.attention.local_global.operator import pairs
from hdplugins.attention.operator import BlockOrder
from support.attention_graphs import chain_of
from support.attention_layers import PADDINGS, token_kinds
from support.comparators import assert_close, named_case
from support.exact_answers import answer_of_body, assert_as_accurate_as, error_of_pytorch, exact_answer
from support.function_bodies import new_session, operators_of, run, unnoticed_mistakes
from support.operators.local_global import NODES, LocalGlobal, inputs_of, wrong_nodes

each_order = pytest.mark.parametrize("order", BlockOrder, ids=lambda order: order.value)
each_node = pytest.mark.parametrize("node", NODES, ids=str)


@functools.cache
def usual_error_of_pytorch(node: LocalGlobal) -> float:
    """The largest error in a text that is long enough to show the effect of rounding."""
    return error_of_pytorch(node, inputs_of(node, token_kinds("none", 211)))


def assert_right(node: LocalGlobal, got: np.ndarray, inputs: Mapping[str, np.ndarray]) -> None:
    # A few values are not enough to show the effect of rounding.
    error = max(usual_error_of_pytorch(node), error_of_pytorch(node, inputs))
    assert_as_accurate_as(error, node, got, inputs)
    assert (got.swapaxes(1, 2)[inputs["token_mask"] == 0] == 0).all()


# The definition.


@each_node
def test_the_definition_is_a_softmax_over_the_tokens_and_sides_in_view(node: LocalGlobal) -> None:
    for tokens, padding in ((37, "right"), (37, "left"), (40, "holes"), (3, "none"), (48, "all")):
        mask = token_kinds(padding, tokens)
        inputs = inputs_of(replace(node, dtype="float64"), mask)
        got = exact_answer(node, inputs)
        for batch, head, i in np.ndindex(got.shape[:3]):
            near, sides, own = node.keys_by_hand(mask[batch], i)
            expected = np.zeros(node.head_dim)
            if near:
                keys, values = inputs["key"][batch, head, near], inputs["value"][batch, head, near]
                biases = [inputs["local_bias"][head, key - i + node.radius] for key in near]
                for side in sides:
                    keys = np.concatenate([keys, inputs["side_key"][batch, head, [side]]])
                    values = np.concatenate([values, inputs["side_value"][batch, head, [side]]])
                    distance = max(-node.reach, min(node.reach, side - own))
                    biases.append(inputs["side_bias"][head, distance + node.reach])
                scores = inputs["query"][batch, head, i] @ keys.T * node.head_dim**-0.5 + biases
                weights = np.exp(scores - scores.max())
                expected = weights @ values / weights.sum()
            assert_close(got[batch, head, i], expected, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"radius": -1}, "radius is -1; it must be 0 or more"),
        ({"radius": 8}, "local_bias has 19 distances; a radius of 8 has 17"),
        ({"side_tokens": 0}, "There are sides, and side_tokens is 0 and side_reach 128; both must be 1 or more"),
        ({"side_reach": 0}, "There are sides, and side_tokens is 16 and side_reach 0"),
        ({"side_reach": 127}, "side_bias has 257 distances; a reach of 127 has 255"),
        ({"side_tokens": 17}, "There are 3 side keys and 3 values; 33 tokens have 2 blocks of 17"),
        ({"side_key": None}, "There are no sides, but side_tokens is 16 and side_reach 128; both must be 0"),
    ],
    ids=str,
)
def test_what_the_operator_does_not_define_is_refused(changes: dict[str, Any], message: str) -> None:
    node = LocalGlobal(side=16, reach=128)
    with pytest.raises(ValueError, match=message):
        exact_answer(node, inputs_of(node, token_kinds("none", 33)), torch.float32, **changes)


@pytest.mark.parametrize(("tokens", "sides"), [(15, 0), (16, 1), (31, 1), (32, 2), (4096, 256)])
def test_a_side_is_counted_once_it_is_whole(tokens: int, sides: int) -> None:
    local, whole = (
        pairs(node.node_attributes, tokens=tokens, heads=3)
        for node in (LocalGlobal(radius=127), LocalGlobal(radius=127, side=16, reach=128))
    )
    assert whole == local + 3 * tokens * sides


# The bodies against the definition.


@each_node
def test_a_body_matches_the_definition_at_every_length(node: LocalGlobal) -> None:
    """Paddings and batches alternate."""
    paddings, batches = itertools.cycle(PADDINGS), itertools.cycle((3, 1, 3))
    for tokens in node.lengths:
        padding, batch = next(paddings), next(batches)
        inputs = inputs_of(node, token_kinds(padding, tokens, batch=batch))
        for order in BlockOrder:
            with named_case(order.value, tokens, padding, batch):
                assert_right(node, answer_of_body(node, order, inputs), inputs)


@pytest.mark.parametrize("node", [NODES[0], NODES[3], NODES[5]], ids=str)
def test_every_padding_meets_every_batch_and_length(node: LocalGlobal) -> None:
    for number, (padding, tokens) in enumerate(itertools.product(PADDINGS, (15, 131, 144)), NODES.index(node)):
        batch = (1, 3)[number % 2]
        inputs = inputs_of(node, token_kinds(padding, tokens, batch=batch))
        for order in BlockOrder:
            with named_case(order.value, padding, tokens, batch):
                assert_right(node, answer_of_body(node, order, inputs), inputs)


def test_a_text_of_more_sides_than_the_reach_tells_apart() -> None:
    node = LocalGlobal(side=4, reach=128, radius=3, heads=1)
    for padding, tokens in (("none", 4 * 129), ("right", 1031), ("left", 1031)):
        inputs = inputs_of(node, token_kinds(padding, tokens, batch=1))
        for order in BlockOrder:
            with named_case(order.value, padding, tokens):
                assert_right(node, answer_of_body(node, order, inputs), inputs)


@each_order
@pytest.mark.parametrize("node", [NODES[0], NODES[3]], ids=str)
def test_what_is_not_seen_does_not_change_the_answer(node: LocalGlobal, order: BlockOrder) -> None:
    """Padding, and sides behind the last whole one."""
    mask = token_kinds("right", 97)
    inputs = inputs_of(node, mask)
    before = answer_of_body(node, order, inputs)
    for name in ("key", "value"):
        inputs[name].swapaxes(1, 2)[mask == 0] = 50.0
    for name in ("side_key", "side_value"):
        if name in inputs:
            inputs[name][0, :, 49 // 16 :] = 50.0
            inputs[name][1:, :, 97 // 16 :] = 50.0
    np.testing.assert_array_equal(before, answer_of_body(node, order, inputs))


@each_order
def test_nodes_that_differ_share_a_model(order: BlockOrder) -> None:
    local, sides = LocalGlobal(), LocalGlobal(side=16, reach=128)
    model, inputs = chain_of((sides, local, sides), order), inputs_of(sides, token_kinds("right", 131))
    assert len(model.functions) == 2
    exact = {name: array.astype(np.float64) if array.dtype.kind == "f" else array for name, array in inputs.items()}
    for node in (sides, local, sides):
        exact["query"] = exact_answer(node, exact)
    # Measured 1.6e-6; a query of the second and third has what the layer before it rounded.
    assert_close(run(new_session(model), inputs), exact["query"], atol=5e-6)


# Wrong answers are found.


@each_node
def test_the_measure_of_bodies_refuses_wrong_answers(node: LocalGlobal) -> None:
    inputs = inputs_of(node, token_kinds("right", 211))
    assert_right(node, exact_answer(node, inputs).astype(node.dtype), inputs)
    wrong = [exact_answer(node, inputs | {"token_mask": np.maximum(inputs["token_mask"], 1)})]
    if node.radius:  # of a single key without sides, all scores are alike
        wrong.append(exact_answer(node, inputs, scale=1.01 * node.head_dim**-0.5))
        wrong.append(exact_answer(node, inputs | {"local_bias": inputs["local_bias"][:, ::-1].copy()}))
    if node.side:
        wrong.append(exact_answer(node, inputs | {"side_bias": inputs["side_bias"][:, ::-1].copy()}))
        wrong.append(exact_answer(node, inputs | {"side_key": np.roll(inputs["side_key"], 1, axis=2)}))
        wrong.append(exact_answer(node, inputs | {"side_value": np.roll(inputs["side_value"], 1, axis=2)}))
    for other in wrong_nodes(node):
        own = inputs_of(other, inputs["token_mask"])
        table = np.pad(inputs["local_bias"], ((0, 0), (other.radius - node.radius,) * 2))
        own |= {name: array for name, array in inputs.items() if name in own and array.shape == own[name].shape}
        wrong.append(exact_answer(other, own | {"local_bias": table}))
    for answer in wrong:
        with pytest.raises(AssertionError):
            assert_right(node, answer.astype(node.dtype), inputs)


HARMLESS = {
    BlockOrder.PARALLEL: {
        "Sub 1": "more masked places follow the text than a span can reach",
        "Add 3": "0 is taken away in place of being added",
    },
    BlockOrder.SEQUENTIAL: {
        "Min 0": "one block holds the whole text",
        "Min 1": "spans are wider, and the places that this adds are masked",
        "Add 3": "as in parallel, where the text is longer than the radius",
    },
}
"""Order -> mistakes that change no answer, and the reason."""


@each_order
def test_a_wrong_body_is_found(order: BlockOrder) -> None:
    inputs = inputs_of(NODES[4], token_kinds("holes", 211))
    unnoticed = unnoticed_mistakes(
        chain_of([NODES[4]], order), lambda session: assert_right(NODES[4], run(session, inputs), inputs)
    )
    assert unnoticed == [*HARMLESS[order]]


# The nodes of a body.


@each_order
def test_a_body_is_of_standard_operators_that_every_runtime_takes(order: BlockOrder) -> None:
    forbidden = {"NonZero", "ScatterND", "ScatterElements", "TopK", "OneHot", "Compress", "Unique"}
    for node in NODES:
        counts = operators_of(node.body(order))
        assert not forbidden & set(counts), str(node)
        assert counts["MatMul"] + counts["Gemm"] == (4 if node.side else 2), str(node)
        assert (counts["Softmax"], counts["Scan"]) == (1, 2 * (order is BlockOrder.SEQUENTIAL)), str(node)


@each_order
def test_bodies_that_differ_have_names_that_differ(order: BlockOrder) -> None:
    nodes = [
        LocalGlobal(radius=radius, side=side, reach=128 * bool(side))
        for radius, side in itertools.product((0, 9, 127), (0, 4, 16))
    ]
    bodies = {node.body(order).name: node.body(order).SerializeToString() for node in nodes}
    assert len(bodies) == len(set(bodies.values())) == len(nodes)
    assert LocalGlobal(radius=127, side=16, reach=128).name == "LocalGlobalAttention_radius127_sides16"


@pytest.mark.parametrize(
    ("changes", "message"), [({"radius": -1}, "radius is -1"), ({"side": 4}, "side_reach 0; both must be 1 or more")]
)
def test_a_body_of_nonsense_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(NODES[0], **changes).body()
