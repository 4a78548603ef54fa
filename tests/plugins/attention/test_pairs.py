"""The pairs that operators count, against those that their references look at."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hdplugins import OPERATORS, Operator
from hdplugins.attention.blocks.operator import pairs as block_pairs
from hdplugins.attention.window.operator import pairs as window_pairs
from support.described_operators import NODES
from support.operators.blocks import Blocks
from support.operators.window import Window

each_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)

HEADS = 4


@each_operator
def test_an_operator_counts_the_pairs_that_its_reference_looks_at(operator: Operator) -> None:
    for layer in NODES[operator.name]:
        tables = dict(zip(operator.optional_inputs, layer.constants.values(), strict=False))
        for tokens in (1, 2, 5, 29, 64, 131):
            for global_tokens in {0, min(1, tokens, layer.bound), min(4, tokens, layer.bound)}:
                decisive = {**layer.node_attributes, **tables, "global_tokens": global_tokens}
                counted = operator.pairs(decisive, tokens=tokens, heads=layer.heads)
                assert counted == layer.looked_at(tokens, global_tokens), (str(layer), tokens)


@settings(max_examples=150)
@given(
    tokens=st.integers(1, 40),
    left=st.integers(0, 45),
    right=st.integers(0, 45),
    dilation=st.lists(st.integers(1, 7), min_size=1, max_size=1) | st.lists(st.integers(1, 7), min_size=3, max_size=3),
    data=st.data(),
)
def test_any_window_is_counted_as_one_would_by_hand(
    tokens: int, left: int, right: int, dilation: list[int], data: st.DataObject
) -> None:
    global_tokens = data.draw(st.integers(0, tokens))
    window = {"left": left, "right": right, "dilation": dilation, "global_bound": tokens}
    counted = window_pairs({**window, "global_tokens": global_tokens}, tokens=tokens, heads=3)
    by_hand = sum(
        key < global_tokens or (-left * step <= key - query <= right * step and (key - query) % step == 0)
        for step in dilation * (3 // len(dilation))
        for query in range(tokens)
        for key in range(tokens)
    )
    assert counted == by_hand


def test_a_window_is_linear_in_tokens_once_it_is_full() -> None:
    """2 * 256 + 1 keys a query, but at the two edges, where a triangle of 256 * 257 / 2 is missing each."""
    layer = Window(left=256, right=256)
    assert window_pairs(layer.node_attributes, tokens=4096, heads=12) == 12 * (513 * 4096 - 256 * 257)


@settings(max_examples=80)
@given(
    tokens=st.integers(1, 40),
    first_global=st.integers(0, 3),
    numbers=st.tuples(st.integers(1, 7), st.integers(0, 1), st.integers(-1, 3), st.integers(0, 2), st.integers(0, 15)),
    table=st.tuples(st.sampled_from([1, HEADS]), st.integers(0, 8), st.integers(1, 4)).flatmap(
        lambda shape: arrays(np.int32, shape, elements=st.integers(-2, 9))
    ),
)
def test_any_table_of_blocks_is_counted_as_the_reference_looks_at_it(
    tokens: int, first_global: int, numbers: tuple[int, int, int, int, int], table: npt.NDArray[np.int32]
) -> None:
    block, last, window, repeats, dense = numbers
    layer = Blocks(block=block, first=first_global, last=last, window=window, repeats=repeats, dense=dense, heads=HEADS)
    counted = block_pairs({**layer.node_attributes, "listed_blocks": table}, tokens=tokens, heads=HEADS)
    assert counted == layer.looked_at(tokens, listed_blocks=torch.from_numpy(table))


def test_blocks_are_linear_in_tokens() -> None:
    """BigBird's: 5 blocks of keys a row of blocks, 4 at both ends' neighbours, and two rows that see all."""
    attributes = Blocks(block=64, repeats=3, dense=704).node_attributes
    by_hand = 64 * 64 * (60 * 5 + 2 * 4 + 2 * 64)
    assert block_pairs(attributes, tokens=4096, heads=12) == 12 * by_hand


def test_a_table_of_other_heads_is_not_counted() -> None:
    decisive = {**Blocks(block=2).node_attributes, "listed_blocks": np.zeros((2, 3, 1))}
    with pytest.raises(ValueError, match=r"listed_blocks is \[2, 3, 1\]; with 4 heads it is \[1 or 4, rows, listed\]"):
        block_pairs(decisive, tokens=9, heads=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dilation": (1, 2)}, r"dilation \[1, 2\] does not fit 3 heads"),
        ({"dilation": (0,)}, r"dilation \[0\] does not fit"),
        ({"global_tokens": 3, "global_bound": 2}, "3 global tokens: a sequence of 9 tokens may have 0 to 2"),
        ({"global_tokens": 10, "global_bound": 10}, "10 global tokens: a sequence of 9 tokens may have 0 to 9"),
        ({"global_tokens": -1}, "-1 global tokens"),
    ],
)
def test_what_cannot_be_is_not_counted(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        window_pairs(Window(left=1, right=1).node_attributes | changes, tokens=9, heads=3)
