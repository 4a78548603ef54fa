"""Embeddings and scores as rows of a tensor, for inference servers."""

from __future__ import annotations

from typing import Any, NamedTuple

from hdruntime.tasks.embedding import Embedding
from hdruntime.tasks.task import Pairs, TextTask
from hdruntime.tasks.text_classification import TextClassification
from hdruntime.text.logits import activated

TEXT, TEXT_PAIR = "TEXT", "TEXT_PAIR"
"""The input tensors: a text, and the second text of a pair, [texts] or [texts, 1]."""

TRUNCATED = "truncated"
"""The output tensor that says whether each text or pair was truncated, bool [texts] or [texts, 1]."""


class RowTensor(NamedTuple):
    """The output tensor, float32 [texts, size].

    Attributes:
        name: name of the tensor.
        size: number of floats for each text.
        pairs: whether the texts of the input are pairs.
    """

    name: str
    size: int
    pairs: Pairs


def row_tensor(task: TextTask) -> RowTensor | None:
    """The tensor of a task; None if its answers differ in length."""
    if isinstance(task, Embedding):
        return RowTensor("embedding", task.dimensions, Pairs.REJECTED)
    if isinstance(task, TextClassification):
        return RowTensor("scores", len(task.labels), task.pairs)
    return None


def row_of(task: TextTask, answer: Any) -> Any:
    """The floats of an answer, [size]: an embedding, or scores by the model's own activation."""
    return activated(answer, task.activation) if isinstance(task, TextClassification) else answer
