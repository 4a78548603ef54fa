"""The profile and the padded shape of a batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdruntime.backends.tensorrt.shapes import ShapeChoice, check_limits, choose_profile, longest, max_rows
from hdruntime.bundle.manifest import ProfileShape, TensorSpec
from hdruntime.errors import BackendUnavailableError, InputError
from hdruntime.gpu.layout import Shape, layout_of, padding_ranges, rounded_up
from support.comparators import named_case

BUCKETS = tuple(ProfileShape(batch=(1, 1, 8), tokens=(1, length, length)) for length in (128, 512, 4096))
UNEVEN = (
    ProfileShape(batch=(1, 1, 64), tokens=(1, 32, 32)),
    ProfileShape(batch=(4, 4, 8), tokens=(100, 256, 512)),
    ProfileShape(batch=(1, 1, 1), tokens=(1, 1000, 1000)),
)


CHOICES = [
    (BUCKETS, 1, 1, ShapeChoice(0, Shape(1, 16))),
    (BUCKETS, 8, 128, ShapeChoice(0, Shape(8, 128))),
    (BUCKETS, 1, 129, ShapeChoice(1, Shape(1, 144))),
    (BUCKETS, 1, 4096, ShapeChoice(2, Shape(1, 4096))),
    # Padding up to profile 1 would compute 4 x 112 tokens for 1 x 100.
    (UNEVEN, 1, 100, ShapeChoice(2, Shape(1, 112))),
    (UNEVEN, 2, 100, ShapeChoice(1, Shape(4, 112))),
    # The last step is cut at the profile's end.
    (UNEVEN, 1, 999, ShapeChoice(2, Shape(1, 1000))),
]


def test_a_batch_goes_to_the_narrowest_profile_and_is_padded_up_where_that_computes_least() -> None:
    for profiles, batch, tokens, choice in CHOICES:
        with named_case(batch, tokens, choice):
            assert choose_profile(profiles, batch, tokens) == choice


@given(st.integers(1, 64), st.integers(1, 1000))
def test_a_choice_holds_the_batch_and_lies_in_its_profile(batch: int, tokens: int) -> None:
    rows = max_rows(UNEVEN, tokens)
    if batch > rows:
        with pytest.raises(InputError, match=f"{batch} rows of {tokens} tokens; this engine accepts up to {rows}"):
            choose_profile(UNEVEN, batch, tokens)
        return
    index, shape = choose_profile(UNEVEN, batch, tokens)
    profile = UNEVEN[index]
    assert batch <= shape.batch
    assert tokens <= shape.tokens
    assert profile.batch[0] <= shape.batch <= profile.batch[2]
    assert profile.tokens[0] <= shape.tokens <= profile.tokens[2]


@given(st.integers(1, 100_000))
def test_padding_is_less_than_a_sixteenth_or_sixteen_tokens(tokens: int) -> None:
    profile = ProfileShape(batch=(1, 1, 1), tokens=(1, 200_000, 200_000))
    padded = choose_profile([profile], 1, tokens).shape.tokens
    assert 0 <= padded - tokens < max(16, tokens / 16)


def test_an_engine_sees_few_lengths() -> None:
    profile = ProfileShape(batch=(1, 1, 1), tokens=(1, 8192, 8192))
    assert len({choose_profile([profile], 1, tokens).shape for tokens in range(1, 8193)}) == 96


def test_rows_are_limited_by_the_profiles_that_take_the_length() -> None:
    assert [max_rows(UNEVEN, tokens) for tokens in (1, 32, 33, 512, 513, 1000, 1001)] == [64, 64, 8, 8, 1, 1, 0]
    assert longest(UNEVEN) == 1000


def limit_of(tokens: int) -> int:
    """Blocks of 20 tokens, of which two are dense."""
    return max(40, -(-tokens // 20) * 20)


@given(st.integers(1, 8), st.integers(1, 4096))
def test_no_batch_is_padded_beyond_its_limit(batch: int, tokens: int) -> None:
    index, shape = choose_profile(BUCKETS, batch, tokens, limit=limit_of(tokens))
    assert tokens <= shape.tokens <= min(limit_of(tokens), BUCKETS[index].tokens[2])
    free = choose_profile(BUCKETS, batch, tokens)
    assert shape.tokens == min(free.shape.tokens, limit_of(tokens))


def test_a_profile_beyond_the_limit_accepts_no_batch() -> None:
    # Profile 1 begins at 100 tokens, and profile 2 takes one row only.
    assert choose_profile(UNEVEN, 4, 81, limit=100).profile == 1
    assert [max_rows(UNEVEN, tokens, limit=limit_of(tokens)) for tokens in (32, 80, 81, 512)] == [64, 1, 8, 8]
    with pytest.raises(InputError, match="4 rows of 80 tokens; this engine accepts up to 1 of that length"):
        choose_profile(UNEVEN, 4, 80, limit=80)


def test_an_engine_that_would_have_to_pad_too_far_is_refused() -> None:
    for profiles in (BUCKETS, UNEVEN):
        check_limits(profiles, limit_of)
    # Between 40 and 61 tokens there is no profile, and 41 to 60 may not be padded to 61.
    gap = (ProfileShape(batch=(1, 1, 1), tokens=(1, 40, 40)), ProfileShape(batch=(1, 1, 1), tokens=(61, 99, 99)))
    with pytest.raises(BackendUnavailableError, match="runs 60 tokens only with padding to more than 60, which"):
        check_limits(gap, limit_of)
    check_limits(gap, lambda tokens: 100)
    # The last block ends after the longest row.
    check_limits((gap[0], ProfileShape(batch=(1, 1, 1), tokens=(60, 99, 99))), limit_of)


def test_too_many_tokens_are_refused_with_the_limit() -> None:
    with pytest.raises(InputError, match=r"1001 tokens; this engine accepts 1 to 1000.\n.*max_len=1001"):
        choose_profile(UNEVEN, 1, 1001)


def test_tensors_lie_apart_and_aligned() -> None:
    int64, float32 = np.dtype(np.int64), np.dtype(np.float32)
    layout = layout_of(
        {
            "ids": (TensorSpec(name="ids", dtype="int64", shape=("batch", "tokens")), int64),
            "vectors": (TensorSpec(name="vectors", dtype="float32", shape=("batch", "tokens", 5)), float32),
            "scores": (TensorSpec(name="scores", dtype="float32", shape=("batch", 3)), float32),
        },
        Shape(3, 11),
    )
    assert {name: (place.offset, place.shape, place.size) for name, place in layout.places.items()} == {
        "ids": (0, (3, 11), 264),
        "vectors": (512, (3, 11, 5), 660),
        "scores": (512 + 768, (3, 3), 36),
    }
    assert layout.size == 512 + 768 + 256


@given(st.integers(1, 1 << 40))
def test_blocks_are_an_eighth_or_64_kib_larger_at_most(size: int) -> None:
    assert size <= rounded_up(size) <= size + max(1 << 16, size // 8)


def test_padding_is_found_across_rows() -> None:
    for mask, ranges in [
        ([[1, 1, 1]], []),
        ([[0, 0, 0], [0, 0, 0]], [(0, 6)]),
        ([[1, 0, 0], [0, 0, 1], [0, 1, 0]], [(1, 5), (6, 7), (8, 9)]),
        ([[0, 1], [1, 0], [1, 1]], [(0, 1), (3, 4)]),
    ]:
        with named_case(mask, ranges):
            assert padding_ranges(np.array(mask)) == ranges
