"""Packing rows of different lengths into batches under a token budget: pure functions on lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hdruntime.arrays import IntArray
from hdruntime.errors import InputError


def pack_by_tokens(
    lengths: Sequence[int],
    *,
    batch_tokens: int,
    alike: Callable[[int], int] | None = None,
    most_rows: Callable[[int], int] | None = None,
) -> list[list[int]]:
    """Sort rows by length and cut them into batches of at most ``batch_tokens`` tokens, padding included.

    Args:
        lengths: tokens of each row, 1 or more.
        batch_tokens: most tokens of a batch: its rows times its longest row. A longer row goes alone.
        alike: tokens of a row -> a key that all rows of a batch share; lengths between two of equal key have that key
            too. None if any lengths may share a batch.
        most_rows: tokens of a batch's longest row -> most rows of that batch; None for any number.

    Returns:
        the batches, longest rows first, each a list of indices into ``lengths``. The longest come first so
        that a lack of memory shows at once, not after an hour. Rows of one length keep their order.

    Raises:
        InputError: ``batch_tokens`` is less than 1.
    """
    if batch_tokens < 1:
        raise InputError(f"batch_tokens is {batch_tokens}; it must be 1 or more, for example 16384.")
    batches: list[list[int]] = []
    most, kind = 0, None
    for row in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        kind_of_row = None if alike is None else alike(lengths[row])
        if not batches or len(batches[-1]) == most or kind_of_row != kind:
            batches.append([])
            longest, kind = lengths[row], kind_of_row
            most = max(1, batch_tokens // longest)
            if most_rows is not None:
                most = min(most, most_rows(longest))
        batches[-1].append(row)
    return batches


def grouped(sizes: Sequence[int], *, most: int, most_in_all: int) -> Iterator[slice]:
    """Cut items into groups of neighbours; an item that is larger than a group goes alone.

    Args:
        sizes: of the items.
        most: items of a group.
        most_in_all: size of a group's items together.
    """
    first = size = 0
    for place, of_item in enumerate(sizes):
        if place > first and (place - first == most or size + of_item > most_in_all):
            yield slice(first, place)
            first, size = place, 0
        size += of_item
    if sizes:
        yield slice(first, len(sizes))


def padded(rows: Sequence[Sequence[int]], *, value: int) -> IntArray:
    """Rows of ids as one array, shorter rows filled up on the right.

    Returns:
        int64 [batch, tokens], tokens being the longest row's.
    """
    array = np.full((len(rows), max(map(len, rows))), value, dtype=np.int64)
    for row, ids in zip(array, rows, strict=True):
        row[: len(ids)] = ids
    return array
