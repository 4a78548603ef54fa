"""The grid of a verification: the lengths, batches and paddings that a bundle is checked with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

from hdexport.attention.attention_type import Boundaries
from hdruntime.bundle.verification import Case

LONGEST_CHECKED = 8192
"""Tokens of the longest input that is checked by default: PyTorch needs minutes for more."""

_BATCH_TOKENS = 65
"""Tokens of the quick grid's batches: one more than the sizes that blocks and tiles usually have."""


class Grid(StrEnum):
    """The cases of a verification."""

    QUICK = "quick"
    """About ten cases, each a boundary: as many as a build can afford."""
    FULL = "full"
    """Every length of `grid_lengths`, each with every batch and padding."""


def grid_lengths(
    base: int,
    max_len: int,
    *,
    boundaries: Sequence[Boundaries] = (),
    longest: int = LONGEST_CHECKED,
) -> list[int]:
    """The lengths to check: around the smallest, attention's and the checkpoint's limits, and the longest. For `base`,
    the n positions of the checkpoint, the grid holds n - 1, n, n + 1 and 2 n. Lengths above `longest` are left out."""
    wanted = {1, 2, 63, 64, 65, base - 1, base, base + 1, 2 * base, max_len}
    for boundary in boundaries:
        wanted |= boundary.lengths
    return sorted(length for length in wanted if 1 <= length <= min(max_len, longest))


def cases(
    grid: Grid,
    base: int,
    max_len: int,
    *,
    boundaries: Sequence[Boundaries] = (),
    longest: int = LONGEST_CHECKED,
) -> list[Case]:
    """The cases of a grid, the short ones first; `base` are the positions of the checkpoint, and lengths above
    `longest` are left out."""
    if grid is Grid.FULL:
        lengths = grid_lengths(base, max_len, boundaries=boundaries, longest=longest)
        return [case for tokens in lengths for case in _full_cases(tokens)]
    last = min(max_len, longest)
    chosen = [*_short_cases(last), *_cases_past_the_checkpoint(base, last)]
    for boundary in boundaries:
        if boundary.first < last:
            chosen += [_alone(boundary.first)] if boundary.alone else []
            chosen += _cases_around(boundary.first, boundary.second, last)
    chosen.append(_alone(last))
    return sorted(dict.fromkeys(chosen), key=lambda case: case.tokens)


def _alone(tokens: int) -> Case:
    return Case(tokens=tokens, lengths=(tokens,), padding="none")


def _full_cases(tokens: int) -> Iterator[Case]:
    part = -(-3 * tokens // 4)
    yield _alone(tokens)
    yield Case(tokens=tokens, lengths=(tokens,) * 3, padding="none")
    if part < tokens:
        yield Case(tokens=tokens, lengths=(part,), padding="right")
        yield Case(tokens=tokens, lengths=(tokens, part, 1), padding="right")
        yield Case(tokens=tokens, lengths=(part, tokens, 1), padding="left")


def _short_cases(last: int) -> Iterator[Case]:
    """Short texts, which show wrong batches and masks, and take PyTorch no time."""
    yield _alone(1)
    if last == 1:
        return
    yield Case(tokens=2, lengths=(2,) * 3, padding="none")
    tokens = min(last, _BATCH_TOKENS)
    yield _alone(tokens)
    part = -(-3 * tokens // 4)
    yield Case(tokens=tokens, lengths=(tokens, part, 1), padding="right")
    yield Case(tokens=tokens, lengths=(part, tokens, 1), padding="left")


def _cases_past_the_checkpoint(base: int, last: int) -> Iterator[Case]:
    """Positions that the checkpoint lacks, and padding where they are."""
    if base < last:
        yield _alone(base + 1)
    if base + 2 <= last:
        few = min(9, base)
        yield Case(tokens=base + 2, lengths=(few,), padding="right")
        yield Case(tokens=base + 2, lengths=(few,), padding="left")


def _cases_around(first: int, second: int, last: int) -> Iterator[Case]:
    """One batch with each padding, in which several lengths are checked at once; no text is longer than `last`."""
    second = min(second, last)
    yield Case(tokens=second, lengths=(second, min(first + 1, second), first), padding="right")
    yield Case(tokens=second, lengths=(min(first + 1, second), second), padding="left")


def within(cases: Sequence[Case], longest: int) -> tuple[list[Case], list[Case]]:
    """Cases of the quick grid of at most `longest` tokens, with one row of so many in place of the longer ones, and the
    longer ones."""
    longer = [case for case in cases if case.tokens > longest]
    kept = [case for case in cases if case.tokens <= longest]
    if longer:
        kept.append(_alone(longest))
    return list(dict.fromkeys(kept)), longer
