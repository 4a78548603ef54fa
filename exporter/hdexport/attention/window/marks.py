"""The input ``global_attention_mask`` of models whose callers mark global tokens."""

from __future__ import annotations

__all__ = ["MOST_GLOBAL_TOKENS", "marks_input"]

from typing import Any

from hdexport.model.tasks import Task
from hdruntime.bundle.manifest import Default, Fill, InputSpec, Role
from hdruntime.errors import InputError, ModelError

MOST_GLOBAL_TOKENS = 3840
"""Largest k of a TopK in TensorRT, by which the graph finds them."""

_DEFAULT_BOUND = 16

_DEFAULT_BOUND_OF_QUESTIONS = 64
"""A question's tokens are all global."""


def marks_input(config: Any, task: Task, *, max_global: int | None = None) -> InputSpec:
    """What is marked where a caller marks nothing, and how many tokens a text may have marked.

    Args:
        config: the model's configuration in ``transformers``.
        task: decides the default: for question answering the question, as Hugging Face does it; the first token else.
        max_global: the most global tokens of a text; None for 16, in question answering 64.

    Raises:
        InputError: `max_global` is out of its range.
        ModelError: question answering, and the model's separator is unknown.
    """
    if max_global is not None and not 1 <= max_global <= MOST_GLOBAL_TOKENS:
        raise InputError(f"--max-global {max_global} is out of range: it is 1 to {MOST_GLOBAL_TOKENS}.")
    if task is not Task.QUESTION_ANSWERING:
        return _marks(Default(fill=Fill.FIRST_TOKEN), max_global or _DEFAULT_BOUND)
    if config.sep_token_id is None:
        raise ModelError(
            "config.json has no sep_token_id, so where a question ends is unknown.\n"
            'Add it: the id of the token after the question, e.g. "sep_token_id": 2.'
        )
    question = Default(fill=Fill.UNTIL_TOKEN, token_id=int(config.sep_token_id))
    return _marks(question, max_global or _DEFAULT_BOUND_OF_QUESTIONS)


def _marks(default: Default, bound: int) -> InputSpec:
    return InputSpec(
        name="global_attention_mask",
        dtype="int64",
        shape=("batch", "tokens"),
        role=Role.MARKS,
        default=default,
        bound=bound,
    )
