"""The lengths that a benchmark measures, from the command line's options."""

from __future__ import annotations

import re

from hdruntime.errors import InputError

_FIRST = 512
_STEPS_BELOW_FIRST = 3
"""A model of at most `_FIRST` tokens is measured from an eighth of its longest text."""

_RANGE = re.compile(r"(\d+):(\d+):(x|\+)(\d+)")


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths in tokens, ascending and distinct.

    Args:
        text: numbers (``128,512``), ranges whose ends are both measured (``512:8192:x2`` doubles, ``512:2048:+512``
            adds), or both, with commas between.

    Raises:
        InputError: the text is invalid.
    """
    lengths: set[int] = set()
    for part in text.split(","):
        lengths.update(_lengths_of(part.strip(), text))
    return tuple(sorted(lengths))


def default_lengths(max_len: int) -> tuple[int, ...]:
    """512, doubled up to `max_len`, which is measured too; of shorter models a half, a quarter and an eighth of it."""
    first = _FIRST if max_len > _FIRST else max(1, max_len >> _STEPS_BELOW_FIRST)
    return _multiplied(first, max_len, 2)


def _lengths_of(part: str, text: str) -> tuple[int, ...]:
    if part.isdecimal() and int(part) > 0:
        return (int(part),)
    match = _RANGE.fullmatch(part)
    if match:
        first, last, step = int(match[1]), int(match[2]), int(match[4])
        if 0 < first <= last and step > (match[3] == "x"):
            return _multiplied(first, last, step) if match[3] == "x" else (*range(first, last, step), last)
    raise InputError(
        f"--lengths {text}: {part!r} is not a length in tokens.\n"
        "Give numbers like --lengths 128,512,4096, or a range like --lengths 512:8192:x2 or 512:2048:+512."
    )


def _multiplied(first: int, last: int, factor: int) -> tuple[int, ...]:
    lengths = []
    while first < last:
        lengths.append(first)
        first *= factor
    return (*lengths, last)
