"""The grids of a verification: which cases are in them."""

from __future__ import annotations

import pytest

from hdexport.attention.attention_type import Boundaries
from hdexport.attention.blocks.attention_type import BlocksAttentionType
from hdexport.attention.blocks.conversion import bigbird
from hdexport.attention.window import Window, WindowAttention
from hdexport.attention.window.attention_type import WindowAttentionType
from hdexport.verify.grid import Grid, cases, grid_lengths, within
from hdruntime.bundle.verification import Case


def around_windows(*layers: int, right: int | None = None) -> Boundaries:
    """The lengths that layers with so many tokens on each side want; or with `right` after a query, in one layer."""
    converted = None if right is None else Window(tokens=layers[0], global_tokens=0, dilation=(1,), right=right)
    boundaries = WindowAttentionType().boundaries(WindowAttention(layers=layers, converted=converted))
    assert boundaries is not None
    return boundaries


BLOCKS = BlocksAttentionType().boundaries(bigbird(block_size=64, random_blocks=3))
MODELS = {
    "extended": (512, 4096, []),
    "windowed": (4096, 4096, [around_windows(*[256] * 12)]),
    "nothing after": (512, 4096, [around_windows(256, right=0)]),
    "blocks": (4096, 4096, [BLOCKS]),
    "tiny": (64, 2, []),
}


def test_the_grid_surrounds_the_limits() -> None:
    assert grid_lengths(512, 4096) == [1, 2, 63, 64, 65, 511, 512, 513, 1024, 4096]
    assert grid_lengths(512, 600) == [1, 2, 63, 64, 65, 511, 512, 513, 600]
    assert grid_lengths(512, 40) == [1, 2, 40]
    assert grid_lengths(512, 16384, longest=8192) == [1, 2, 63, 64, 65, 511, 512, 513, 1024]


@pytest.mark.parametrize("model", MODELS)
def test_every_case_has_a_real_token_in_every_row_and_one_full_row(model: str) -> None:
    base, max_len, boundaries = MODELS[model]
    found = cases(Grid.FULL, base, max_len, boundaries=boundaries)
    assert len(found) == len(set(found))
    for case in found:
        assert case.tokens <= max_len
        assert all(1 <= length <= case.tokens for length in case.lengths)
        assert case.padding != "none" or set(case.lengths) == {case.tokens}
        assert case.batch == 1 or case.tokens in case.lengths


@pytest.mark.parametrize("model", MODELS)
def test_a_quick_grid_is_about_ten_cases_and_computes_the_longest_text_once(model: str) -> None:
    base, max_len, boundaries = MODELS[model]
    found = cases(Grid.QUICK, base, max_len, boundaries=boundaries)
    assert len(found) <= 12
    assert {length for length in (1, 65, base + 1, max_len) if length <= max_len} <= {case.tokens for case in found}
    if max_len > 65:
        assert [case for case in found if case.tokens == max_len] == [
            Case(tokens=max_len, lengths=(max_len,), padding="none")
        ]
    if max_len > 1:
        assert {case.batch for case in found} >= {3}
        assert {case.padding for case in found} == {"none", "right", "left"}


def test_a_quick_grid_surrounds_a_window_and_the_longest_dense_text() -> None:
    windowed = cases(Grid.QUICK, 4096, 4096, boundaries=[around_windows(256)])
    assert Case(tokens=514, lengths=(514, 258, 257), padding="right") in windowed
    blocks = cases(Grid.QUICK, 4096, 4096, boundaries=[BLOCKS])
    assert Case(tokens=705, lengths=(705,), padding="none") in blocks  # 704 tokens are attended to densely
    assert Case(tokens=769, lengths=(706, 769), padding="left") in blocks


def test_the_grid_surrounds_both_sides_of_a_window() -> None:
    lengths = grid_lengths(4096, 4096, boundaries=[around_windows(256, right=32)])
    assert {32, 33, 34, 256, 257, 258, 289} <= set(lengths)
    causal = around_windows(256, right=0)
    assert 0 not in causal.lengths
    # A text of two tokens is the first in which a query does not see every key; at 257 the first key is cut off.
    assert Case(tokens=258, lengths=(258, 2, 1), padding="right") in cases(Grid.QUICK, 64, 300, boundaries=[causal])


@pytest.mark.parametrize("model", MODELS)
def test_longer_cases_give_way_to_the_longest_affordable_row(model: str) -> None:
    base, max_len, boundaries = MODELS[model]
    found = cases(Grid.QUICK, base, max_len, boundaries=boundaries)
    assert within(found, max_len) == (found, [])
    kept, longer = within(found, 700)
    added = [Case(tokens=700, lengths=(700,))] if max_len > 700 else []
    assert sorted(map(str, [*kept, *longer])) == sorted(map(str, [*found, *added]))
    assert all(case.tokens <= 700 for case in kept)
    assert all(case.tokens > 700 for case in longer)
