"""Batches of rows of different lengths: how many rows fit under a budget of tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from hdruntime.errors import InputError


def pack_by_tokens(
    lengths: Sequence[int],
    *,
    batch_tokens: int,
    padding_key: Callable[[int], int] | None = None,
    max_padding: Callable[[int], int] | None = None,
    max_rows: Callable[[int], int] | None = None,
    full_tokens: int | None = None,
) -> list[list[int]]:
    """Sort rows by length and pack them into batches of at most `batch_tokens` tokens, padding included.

    The longest rows come first, so that a lack of memory shows early. Rows of equal length keep their order.

    Args:
        lengths: tokens of each row, 1 or more.
        batch_tokens: maximum of a batch's rows times its longest row. A longer row is a batch of its own.
        padding_key: tokens of a row -> key that all rows of a batch share, monotonic in the tokens; None if rows of any
            length may share a batch.
        max_padding: tokens of a batch's longest row -> maximum tokens of padding in the batch; None for any number.
        max_rows: tokens of a batch's longest row -> maximum rows of the batch; None for any number.
        full_tokens: number of tokens from which a batch is full for rows that are a sixteenth shorter than its longest
            row; None for no such limit.

    Returns:
        the batches, each a list of indices into `lengths`.
    """
    if batch_tokens < 1:
        raise InputError(parameter="batch_tokens", value=batch_tokens, accepted="1 or more, for example 16384")
    batches: list[list[int]] = []
    longest, row_limit, padding_left, batch_key = 0, 0, 0, None
    for row in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        key = None if padding_key is None else padding_key(lengths[row])
        if (
            not batches
            or len(batches[-1]) == row_limit
            or key != batch_key
            or longest - lengths[row] > padding_left
            or (
                full_tokens is not None
                and len(batches[-1]) * longest >= full_tokens
                and 16 * (longest - lengths[row]) >= longest
            )
        ):
            batches.append([])
            longest, batch_key = lengths[row], key
            row_limit = max(1, batch_tokens // longest)
            if max_rows is not None:
                row_limit = min(row_limit, max_rows(longest))
            padding_left = sys.maxsize if max_padding is None else max_padding(longest)
        padding_left -= longest - lengths[row]
        batches[-1].append(row)
    return batches


def grouped(sizes: Sequence[int], *, max_items: int, max_total: int) -> Iterator[slice]:
    """Groups of consecutive items: at most `max_items` with a total size of `max_total`, or one larger item."""
    first = total = 0
    for index, size in enumerate(sizes):
        if index > first and (index - first == max_items or total + size > max_total):
            yield slice(first, index)
            first, total = index, 0
        total += size
    if sizes:
        yield slice(first, len(sizes))
