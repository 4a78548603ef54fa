"""Rows are packed under a budget, each once, and what comes back is in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdruntime.backends.row_groups import equal_length_groups, right_padded_rows
from hdruntime.errors import InputError
from hdruntime.inference.batching import pack_by_tokens, padded
from hdruntime.text.pooling import mean_over_tokens

LENGTHS = st.lists(st.integers(1, 70), max_size=60)
BUDGETS = st.integers(1, 400)
Alike = Callable[[int], int] | None


def own_length(tokens: int) -> int:
    return tokens


def tens(tokens: int) -> int:
    return tokens // 10


ALIKE = st.sampled_from([None, own_length, tens])


@given(lengths=LENGTHS, batch_tokens=BUDGETS, alike=ALIKE)
def test_each_row_is_in_one_batch(lengths: list[int], batch_tokens: int, alike: Alike) -> None:
    batches = pack_by_tokens(lengths, batch_tokens=batch_tokens, alike=alike)
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(len(lengths)))
    assert all(batches)


@given(lengths=LENGTHS, batch_tokens=BUDGETS, alike=ALIKE)
def test_a_batch_keeps_its_budget_unless_one_row_alone_is_longer(
    lengths: list[int], batch_tokens: int, alike: Alike
) -> None:
    for rows in pack_by_tokens(lengths, batch_tokens=batch_tokens, alike=alike):
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= batch_tokens


@given(lengths=LENGTHS, batch_tokens=BUDGETS)
def test_rows_of_unlike_lengths_never_share_a_batch_when_lengths_must_be_equal(
    lengths: list[int], batch_tokens: int
) -> None:
    for rows in pack_by_tokens(lengths, batch_tokens=batch_tokens, alike=own_length):
        assert len({lengths[row] for row in rows}) == 1


@given(lengths=LENGTHS, batch_tokens=BUDGETS)
def test_rows_share_a_batch_only_where_they_are_alike(lengths: list[int], batch_tokens: int) -> None:
    batches = pack_by_tokens(lengths, batch_tokens=batch_tokens, alike=tens)
    for rows in batches:
        assert len({tens(lengths[row]) for row in rows}) == 1
    # Of neighbours that are alike, no two would fit into one.
    for batch, following in itertools.pairwise(batches):
        longest = lengths[batch[0]]
        assert tens(longest) != tens(lengths[following[0]]) or (len(batch) + 1) * longest > batch_tokens


@given(lengths=LENGTHS, batch_tokens=BUDGETS, alike=ALIKE)
def test_the_longest_rows_come_first_and_equals_keep_their_order(
    lengths: list[int], batch_tokens: int, alike: Alike
) -> None:
    batches = pack_by_tokens(lengths, batch_tokens=batch_tokens, alike=alike)
    order = list(itertools.chain.from_iterable(batches))
    assert order == sorted(order, key=lambda row: (-lengths[row], row))


@given(lengths=LENGTHS, batch_tokens=BUDGETS)
def test_batches_are_filled(lengths: list[int], batch_tokens: int) -> None:
    """No two neighbours would fit into one: a batch a row would keep every other claim."""
    batches = pack_by_tokens(lengths, batch_tokens=batch_tokens)
    for batch, following in itertools.pairwise(batches):
        assert (len(batch) + 1) * lengths[batch[0]] > batch_tokens, (batch, following)


@given(lengths=LENGTHS, batch_tokens=BUDGETS, alike=ALIKE, rows_of_70=st.integers(1, 4))
def test_a_batch_has_no_more_rows_than_its_longest_allows(
    lengths: list[int], batch_tokens: int, alike: Alike, rows_of_70: int
) -> None:
    def most_rows(tokens: int) -> int:
        return rows_of_70 * 70 // tokens

    batches = pack_by_tokens(lengths, batch_tokens=batch_tokens, alike=alike, most_rows=most_rows)
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(len(lengths)))
    assert all(len(rows) <= most_rows(lengths[rows[0]]) for rows in batches)


@pytest.mark.parametrize("batch_tokens", [0, -5])
def test_an_impossible_budget_is_refused(batch_tokens: int) -> None:
    with pytest.raises(InputError, match=f"batch_tokens is {batch_tokens}; it must be 1 or more"):
        pack_by_tokens([1], batch_tokens=batch_tokens)


@given(rows=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1, max_size=5))
def test_padding_is_on_the_right_and_takes_its_value(rows: list[list[int]]) -> None:
    array = padded(rows, value=-7)
    assert array.dtype == np.int64
    assert array.shape == (len(rows), max(map(len, rows)))
    for row, ids in zip(array.tolist(), rows, strict=True):
        assert row == ids + [-7] * (len(row) - len(ids))


@given(
    mask=st.integers(1, 5).flatmap(
        lambda tokens: st.lists(st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens), min_size=1, max_size=6)
    )
)
def test_groups_hold_each_row_once_and_only_right_padded_ones_have_a_length(mask: list[list[int]]) -> None:
    groups = [(rows.tolist(), length) for rows, length in equal_length_groups(np.array(mask))]
    assert sorted(row for rows, _ in groups for row in rows) == list(range(len(mask)))
    lengths = [length for _, length in groups]
    assert len(set(lengths)) == len(lengths)
    for rows, length in groups:
        for row in rows:
            real = sum(mask[row])
            right_padded = real > 0 and mask[row] == [1] * real + [0] * (len(mask[row]) - real)
            assert length == (real if right_padded else None)
            assert right_padded_rows(np.array(mask))[row] == right_padded


def test_a_mean_ignores_what_padding_holds() -> None:
    hidden_states = np.array([[[1, 2], [3, 6], [np.nan, np.inf]], [[7, 7], [8, 8], [9, 9]]], np.float32)
    means = mean_over_tokens(hidden_states, np.array([[1, 1, 0], [0, 0, 0]]))
    assert means.dtype == np.float32
    assert means.tolist() == [[2, 4], [0, 0]]


def test_a_mean_over_many_tokens_keeps_its_digits() -> None:
    hidden_states = np.full((1, 100_000, 1), 0.1, dtype=np.float32)
    assert mean_over_tokens(hidden_states, np.ones((1, 100_000), np.int64)) == np.float32(0.1)
