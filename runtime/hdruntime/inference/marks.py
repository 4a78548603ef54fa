"""The input ``global_attention_mask``: what it is where a caller leaves it out, and what it may hold."""

from __future__ import annotations

__all__ = ["check_global_tokens", "check_questions", "default_global_attention_mask"]

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hdruntime.bundle.manifest import GlobalAttention
from hdruntime.errors import InputError

IntArray = npt.NDArray[np.int64]


def default_global_attention_mask(
    input_ids: IntArray, attention_mask: IntArray, global_attention: GlobalAttention
) -> IntArray:
    """Mark the first real token of every row, or the tokens of its question: those before the first separator.

    A row of nothing but padding has neither, and nothing is marked.

    Args:
        input_ids: int64 [batch, tokens].
        attention_mask: int64 [batch, tokens], 1 for real tokens.
        global_attention: the bundle's.

    Returns:
        int64 [batch, tokens], 1 for global tokens.

    Raises:
        InputError: a row with no separator, or with more tokens before it than the bundle takes as global.
    """
    if global_attention.separator_id is None:
        first = (attention_mask.cumsum(axis=1) == 1) & (attention_mask == 1)
        return first.astype(np.int64)
    separators = (input_ids == global_attention.separator_id) & (attention_mask == 1)
    question = (separators.cumsum(axis=1) == 0) & (attention_mask == 1)
    for row, (marked, has_separator) in enumerate(zip(question.sum(axis=1), separators.any(axis=1), strict=True)):
        if marked:
            _check_question(f"row {row}", int(marked) if has_separator else None, global_attention)
    return question.astype(np.int64)


def check_questions(texts: Sequence[Sequence[int]], global_attention: GlobalAttention) -> None:
    """Refuse texts whose question cannot be found or is too long, where questions are what is marked.

    Args:
        texts: ids of each text.
        global_attention: the bundle's.

    Raises:
        InputError: naming the first such text.
    """
    separator_id = global_attention.separator_id
    if separator_id is None:
        return
    for index, ids in enumerate(texts):
        what = "the text" if len(texts) == 1 else f"text {index}"
        _check_question(what, ids.index(separator_id) if separator_id in ids else None, global_attention)


def check_global_tokens(
    global_attention_mask: IntArray, attention_mask: IntArray, global_attention: GlobalAttention
) -> None:
    """Refuse rows with more global tokens than the bundle takes; marks on padding do not count.

    Args:
        global_attention_mask: int64 [batch, tokens], 0 or 1.
        attention_mask: int64 [batch, tokens], 1 for real tokens.
        global_attention: the bundle's.

    Raises:
        InputError: naming the first such row.
    """
    bound = global_attention.bound
    marked = (global_attention_mask * attention_mask).sum(axis=1)
    if (marked > bound).any():
        row = int(np.argmax(marked > bound))
        raise InputError(
            f"global_attention_mask: row {row} marks {marked[row]} tokens as global; this bundle takes {bound}.\n"
            f"Mark fewer, or rebuild with --max-global {marked[row]}."
        )


def _check_question(what: str, tokens: int | None, global_attention: GlobalAttention) -> None:
    if tokens is None:
        raise InputError(
            f"There is no separator (id {global_attention.separator_id}) in {what}, so where its question ends is "
            "unknown.\nEncode question and context as a pair, or give global_attention_mask."
        )
    if tokens > global_attention.bound:
        raise InputError(
            f"The question of {what} has {tokens} tokens, which are all global; this bundle takes "
            f"{global_attention.bound}.\n"
            f"Shorten it, give global_attention_mask, or rebuild with --max-global {tokens}."
        )
