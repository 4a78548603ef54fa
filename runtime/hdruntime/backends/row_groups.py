"""Groups of a batch's rows whose padding a backend can cut off, by length; other rows form a separate group."""

from __future__ import annotations

__all__ = ["equal_length_groups", "right_padded_rows"]

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt


def equal_length_groups(
    attention_mask: npt.NDArray[np.int64],
) -> Iterator[tuple[npt.NDArray[np.intp], int | None]]:
    """Group the rows of a batch with padding only on the right by their length.

    Args:
        attention_mask: int64 [batch, tokens], 1 for real tokens, 0 for padding.

    Yields:
        the indices of a group's rows, ascending, and their length; finally, if there are any, the rows with
        another mask (padding on the left, holes, only padding) and None.
    """
    lengths = attention_mask.sum(axis=1)
    right_padded = right_padded_rows(attention_mask)
    for length in np.unique(lengths[right_padded]):
        yield np.flatnonzero(right_padded & (lengths == length)), int(length)
    if not right_padded.all():
        yield np.flatnonzero(~right_padded), None


def right_padded_rows(attention_mask: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """[batch]: which rows begin with at least one real token and have all their padding after the real tokens."""
    # The mask never rises along such a row, and starts with a one.
    return (np.diff(attention_mask, axis=1) <= 0).all(axis=1) & (attention_mask[:, 0] == 1)
