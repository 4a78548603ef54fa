"""Inputs that mark tokens: their defaults, and the checks of their values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hdruntime.arrays import IntArray
from hdruntime.bundle.manifest import Fill, InputSpec, Manifest, Role
from hdruntime.errors import InputError


def default_marks(spec: InputSpec, ids: IntArray, mask: IntArray) -> IntArray:
    """Mark the first real token of every row, or the tokens before the first separator: the question.

    In a row of only padding no token is marked.

    Args:
        spec: the input, whose default marks tokens.
        ids: int64 [batch, tokens].
        mask: int64 [batch, tokens], 1 for real tokens.

    Returns:
        int64 [batch, tokens], 1 for marked tokens.

    Raises:
        InputError: a row has no separator, or more tokens before it than the bundle accepts.
    """
    if spec.default.fill is Fill.FIRST_TOKEN:
        first = (mask.cumsum(axis=1) == 1) & (mask == 1)
        return first.astype(np.int64)
    separators = (ids == spec.default.token_id) & (mask == 1)
    marked = (separators.cumsum(axis=1) == 0) & (mask == 1)
    for row, (count, has_separator) in enumerate(zip(marked.sum(axis=1), separators.any(axis=1), strict=True)):
        if count:
            _check_question(f"row {row}", int(count) if has_separator else None, spec)
    return marked.astype(np.int64)


def check_texts_for_marks(texts: Sequence[Sequence[int]], manifest: Manifest) -> None:
    """Refuse texts without default marks: their question is not found, or is too long.

    Args:
        texts: ids of each text.
        manifest: of the bundle.

    Raises:
        InputError: naming the first such text.
    """
    spec = manifest.input_of(Role.MARKS)
    if spec is None or spec.default.fill is not Fill.UNTIL_TOKEN:
        return
    for index, ids in enumerate(texts):
        what = "the text" if len(texts) == 1 else f"text {index}"
        separator_id = spec.default.token_id
        _check_question(what, ids.index(separator_id) if separator_id in ids else None, spec)


def check_marks(spec: InputSpec, marks: IntArray, mask: IntArray) -> None:
    """Refuse rows with more marks than the bundle accepts; marks on padding do not count.

    Args:
        spec: the input.
        marks: int64 [batch, tokens], 0 or 1.
        mask: int64 [batch, tokens], 1 for real tokens.

    Raises:
        InputError: naming the first such row.
    """
    if spec.bound is None:
        return
    marked = (marks * mask).sum(axis=1)
    if (marked > spec.bound).any():
        row = int(np.argmax(marked > spec.bound))
        raise InputError(
            f"{spec.name}: row {row} marks {marked[row]} tokens as global; this bundle accepts {spec.bound}.\n"
            f"Mark fewer, or build the bundle again with --max-global {marked[row]}."
        )


def _check_question(what: str, tokens: int | None, spec: InputSpec) -> None:
    if tokens is None:
        raise InputError(
            f"The end of the question of {what} is unknown: there is no separator (id {spec.default.token_id}).\n"
            f"Encode question and context as a pair, or give {spec.name}."
        )
    if spec.bound is not None and tokens > spec.bound:
        raise InputError(
            f"The question of {what} has {tokens} tokens, which are all global; this bundle accepts {spec.bound}.\n"
            f"Shorten it, give {spec.name}, or build the bundle again with --max-global {tokens}."
        )
