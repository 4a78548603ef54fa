"""Rows are packed under a budget, each once and in order."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdruntime.backends.cpu_runner import right_padded_rows, similar_length_groups
from hdruntime.errors import InputError
from hdruntime.packing import grouped, pack_by_tokens

LENGTHS = st.lists(st.integers(1, 70), max_size=60)
BUDGETS = st.integers(1, 400)


def tens(tokens: int) -> int:
    return tokens // 10


@given(
    lengths=LENGTHS,
    batch_tokens=BUDGETS,
    padding_key=st.sampled_from([None, int, tens]),
    rows_of_70=st.one_of(st.none(), st.integers(1, 4)),
    enough=st.one_of(st.none(), BUDGETS),
    padding=st.one_of(st.none(), st.integers(0, 30)),
)
def test_batches_are_full_within_every_limit_and_the_longest_rows_come_first(
    lengths: list[int],
    batch_tokens: int,
    padding_key: Callable[[int], int] | None,
    rows_of_70: int | None,
    enough: int | None,
    padding: int | None,
) -> None:
    def limit(tokens: int) -> int:
        most = max(1, batch_tokens // tokens)
        return most if rows_of_70 is None else min(most, rows_of_70 * 70 // tokens)

    max_rows = None if rows_of_70 is None else lambda tokens: rows_of_70 * 70 // tokens

    def padding_of(longest: int, rows: list[int]) -> int:
        return sum(longest - lengths[row] for row in rows)

    batches = pack_by_tokens(
        lengths,
        batch_tokens=batch_tokens,
        padding_key=padding_key,
        # Less padding for long rows.
        max_padding=None if padding is None else lambda tokens: padding if tokens < 50 else padding // 2,
        max_rows=max_rows,
        full_tokens=enough,
    )
    most = [sys.maxsize if padding is None else padding if lengths[rows[0]] < 50 else padding // 2 for rows in batches]
    kind = padding_key or (lambda tokens: 0)
    # Each row is in one batch; rows of one length keep their order.
    order = list(itertools.chain.from_iterable(batches))
    assert order == sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    for rows, allowed in zip(batches, most, strict=True):
        assert 1 <= len(rows) <= limit(lengths[rows[0]])
        assert len({kind(lengths[row]) for row in rows}) == 1
        # No row after enough tokens is much shorter than the first.
        for place, row in enumerate(rows):
            longest = lengths[rows[0]]
            assert enough is None or place * longest < enough or lengths[row] > longest * 15 / 16
        assert padding_of(lengths[rows[0]], rows) <= allowed
    # No two neighbours would fit into one batch.
    for (batch, following), allowed in zip(itertools.pairwise(batches), most, strict=False):
        longest = lengths[batch[0]]
        is_enough = enough is not None and len(batch) * longest >= enough
        is_shorter = lengths[following[0]] <= longest * 15 / 16
        is_full = len(batch) == limit(longest) or (is_enough and is_shorter)
        is_full |= padding_of(longest, [*batch, following[0]]) > allowed
        assert kind(longest) != kind(lengths[following[0]]) or is_full, (batch, following)


def test_an_impossible_budget_is_refused() -> None:
    with pytest.raises(InputError, match="batch_tokens is 0; it must be 1 or more"):
        pack_by_tokens([1], batch_tokens=0)


@given(
    mask=st.integers(1, 5).flatmap(
        lambda tokens: st.lists(st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens), min_size=1, max_size=6)
    ),
    padding=st.integers(0, 6),
)
def test_groups_hold_each_row_once_and_right_padded_ones_with_little_padding(
    mask: list[list[int]], padding: int
) -> None:
    groups = [(rows.tolist(), length) for rows, length in similar_length_groups(np.array(mask), lambda _: padding)]
    assert sorted(row for rows, _ in groups for row in rows) == list(range(len(mask)))
    by_length = [length for _, length in groups if length is not None]
    assert by_length == sorted(by_length, reverse=True)
    for rows, length in groups:
        assert rows == sorted(rows)
        real = [sum(mask[row]) for row in rows]
        for row, tokens in zip(rows, real, strict=True):
            right_padded = tokens > 0 and mask[row] == [1] * tokens + [0] * (len(mask[row]) - tokens)
            assert right_padded == (length is not None)
            assert right_padded_rows(np.array(mask))[row] == right_padded
        if length is not None:
            assert max(real) == length
            assert sum(length - tokens for tokens in real) <= padding
    if not padding:
        assert len(set(by_length)) == len(by_length)


def test_groups_of_neighbours_keep_both_limits() -> None:
    assert [*grouped([1] * 5, max_items=2, max_total=9)] == [slice(0, 2), slice(2, 4), slice(4, 5)]
    # As much as fits, and what is larger alone.
    assert [*grouped([2, 3, 9, 1], max_items=9, max_total=5)] == [slice(0, 2), slice(2, 3), slice(3, 4)]
    assert [*grouped([], max_items=2, max_total=5)] == []
