"""Which lengths a benchmark measures."""

from __future__ import annotations

import pytest

from hdexport.bench.run.lengths import default_lengths, parse_lengths
from hdruntime.errors import InputError


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("128", (128,)),
        ("4096,128, 512,128", (128, 512, 4096)),
        ("512:8192:x2", (512, 1024, 2048, 4096, 8192)),
        ("512:3000:x2", (512, 1024, 2048, 3000)),
        ("512:2048:+512", (512, 1024, 1536, 2048)),
        ("500:1100:+500", (500, 1000, 1100)),
        ("64,512:1024:x2", (64, 512, 1024)),
        ("7:7:x2", (7,)),
        ("5:7:+1", (5, 6, 7)),
    ],
)
def test_numbers_and_ranges_give_rising_lengths_with_both_ends(text: str, lengths: tuple[int, ...]) -> None:
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "1.5", "a", "512:", "512:256:x2", "512:8192:x1", "512:8192:x0", "1:9:+0", "0:8:x2", "1:2:3", "²"],
)
def test_an_invalid_length_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match=r"is not a length in tokens.\n.*--lengths 128,512,4096"):
        parse_lengths(text)


@pytest.mark.parametrize(
    ("max_len", "lengths"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (100, (12, 24, 48, 96, 100)),
        (512, (64, 128, 256, 512)),
        (513, (512, 513)),
        (4096, (512, 1024, 2048, 4096)),
        (5000, (512, 1024, 2048, 4096, 5000)),
    ],
)
def test_the_default_ends_at_the_longest_that_is_accepted(max_len: int, lengths: tuple[int, ...]) -> None:
    assert default_lengths(max_len) == lengths
