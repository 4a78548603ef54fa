"""The tasks: which head a checkpoint is loaded with."""

from __future__ import annotations

__all__ = ["AUTO_CLASS_OF_TASK", "Task", "infer_task", "task_from_name"]

from enum import Enum

from hdruntime.errors import InputError


class Task(str, Enum):
    """What a bundle does; the names are those of Hugging Face optimum."""

    FEATURE_EXTRACTION = "feature-extraction"
    SENTENCE_SIMILARITY = "sentence-similarity"
    FILL_MASK = "fill-mask"
    TEXT_CLASSIFICATION = "text-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    QUESTION_ANSWERING = "question-answering"


AUTO_CLASS_OF_TASK = {
    Task.FEATURE_EXTRACTION: "AutoModel",
    Task.SENTENCE_SIMILARITY: "AutoModel",
    Task.FILL_MASK: "AutoModelForMaskedLM",
    Task.TEXT_CLASSIFICATION: "AutoModelForSequenceClassification",
    Task.TOKEN_CLASSIFICATION: "AutoModelForTokenClassification",
    Task.QUESTION_ANSWERING: "AutoModelForQuestionAnswering",
}
"""Class of ``transformers`` that loads a checkpoint for a task."""

_TASK_OF_HEAD = (
    # A discriminator: it tells replaced tokens from real ones and fills no mask.
    ("ElectraForPreTraining", Task.FEATURE_EXTRACTION),
    ("ForMaskedLM", Task.FILL_MASK),
    ("ForPreTraining", Task.FILL_MASK),
    ("ForSequenceClassification", Task.TEXT_CLASSIFICATION),
    ("ForTokenClassification", Task.TOKEN_CLASSIFICATION),
    ("ForQuestionAnswering", Task.QUESTION_ANSWERING),
)
"""Ending of an architecture's name -> task."""


def task_from_name(name: str) -> Task | None:
    """The task of that name; None for ``auto``.

    Raises:
        InputError: there is no such task; the message lists the valid ones.
    """
    if name == "auto":
        return None
    try:
        return Task(name)
    except ValueError:
        tasks = ", ".join(task.value for task in Task)
        raise InputError(f"There is no task {name!r}.\nChoose one of: auto, {tasks}.") from None


def infer_task(architectures: list[str], *, is_sentence_transformer: bool) -> Task:
    """What a checkpoint was made for.

    Args:
        architectures: the class names in its ``config.json``.
        is_sentence_transformer: whether it carries sentence-transformers' ``modules.json``.
    """
    if is_sentence_transformer:
        return Task.SENTENCE_SIMILARITY
    for architecture in architectures:
        for ending, task in _TASK_OF_HEAD:
            if architecture.endswith(ending):
                return task
    return Task.FEATURE_EXTRACTION
