"""What a bundle says about its input ``global_attention_mask``."""

from __future__ import annotations

__all__ = ["MOST_GLOBAL_TOKENS", "global_attention_of"]

from typing import Any

from hdexport.families import Family
from hdexport.model.tasks import Task
from hdruntime.bundle.manifest import GlobalAttention
from hdruntime.errors import InputError, ModelError

MOST_GLOBAL_TOKENS = 3840
"""Largest k of a TopK in TensorRT, by which the graph finds them."""

_DEFAULT_BOUND = 16

_DEFAULT_BOUND_OF_QUESTIONS = 64
"""A question's tokens are all global."""


def global_attention_of(
    family: Family, config: Any, task: Task, *, max_global: int | None = None
) -> GlobalAttention | None:
    """What is marked where a caller marks nothing, and how many tokens a text may have marked.

    Args:
        family: the model's family.
        config: its configuration in ``transformers``.
        task: decides the default: for question answering the question, as Hugging Face does it; the first token else.
        max_global: the most global tokens of a text; None for 16, in question answering 64.

    Returns:
        None for a family whose attention knows no global tokens.

    Raises:
        InputError: `max_global` is out of its range, or the family has no global tokens.
        ModelError: question answering, and the model's separator is unknown.
    """
    if max_global is not None and not 1 <= max_global <= MOST_GLOBAL_TOKENS:
        raise InputError(f"--max-global {max_global} is out of range: it is 1 to {MOST_GLOBAL_TOKENS}.")
    if family.adapt_global is None:
        if max_global is not None:
            raise InputError(
                f"--max-global {max_global} is for models with an input global_attention_mask, and "
                f"{family.model_types[0]} has none.\nLeave it out."
            )
        return None
    if task is not Task.QUESTION_ANSWERING:
        return GlobalAttention(default="first_token", bound=max_global or _DEFAULT_BOUND, separator_id=None)
    if config.sep_token_id is None:
        raise ModelError(
            "config.json has no sep_token_id, so where a question ends is unknown.\n"
            'Add it: the id of the token after the question, e.g. "sep_token_id": 2.'
        )
    return GlobalAttention(
        default="question", bound=max_global or _DEFAULT_BOUND_OF_QUESTIONS, separator_id=int(config.sep_token_id)
    )
