"""Which lengths a benchmark measures."""

from __future__ import annotations

import pytest

from hdexport.bench.run.lengths import default_lengths, parse_lengths
from hdruntime.errors import InputError


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("4096,128, 512,128", (128, 512, 4096)),
        ("512:3000:x2", (512, 1024, 2048, 3000)),
        ("500:1100:+500", (500, 1000, 1100)),
        ("64,512:1024:x2", (64, 512, 1024)),
        ("5:7:+1", (5, 6, 7)),
    ],
)
def test_numbers_and_ranges_give_rising_lengths_with_both_ends(text: str, lengths: tuple[int, ...]) -> None:
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize("text", ["", "0", "1.5", "512:256:x2", "512:8192:x1", "1:9:+0", "1:2:3"])
def test_an_invalid_length_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match=r"is not a length in tokens.\n.*--lengths 128,512,4096"):
        parse_lengths(text)


@pytest.mark.parametrize(
    ("max_len", "lengths"),
    [(1, (1,)), (100, (12, 24, 48, 96, 100)), (513, (512, 513)), (5000, (512, 1024, 2048, 4096, 5000))],
)
def test_the_default_ends_at_the_longest_that_is_accepted(max_len: int, lengths: tuple[int, ...]) -> None:
    assert default_lengths(max_len) == lengths
