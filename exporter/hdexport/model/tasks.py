"""The tasks: which head a checkpoint is loaded with."""

from __future__ import annotations

__all__ = ["AUTO_CLASS_OF_TASK", "ENCODER_TASKS", "Task", "infer_task", "model_task"]

from enum import Enum


class Task(str, Enum):
    """What a bundle does; the names are those of Hugging Face optimum, where it has one."""

    FEATURE_EXTRACTION = "feature-extraction"
    SENTENCE_SIMILARITY = "sentence-similarity"
    SPARSE_SIMILARITY = "sparse-similarity"
    """A weight for each token of the vocabulary, pooled of the logits of a text's tokens, as SPLADE has it."""
    TOKEN_SIMILARITY = "token-similarity"
    """A vector for each token, as ColBERT has it."""
    FILL_MASK = "fill-mask"
    TEXT_CLASSIFICATION = "text-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    QUESTION_ANSWERING = "question-answering"
    TEXT_SCORING = "text-scoring"
    """The log-probability of each token after those before it."""


AUTO_CLASS_OF_TASK = {
    Task.FEATURE_EXTRACTION: "AutoModel",
    Task.FILL_MASK: "AutoModelForMaskedLM",
    Task.TEXT_CLASSIFICATION: "AutoModelForSequenceClassification",
    Task.TOKEN_CLASSIFICATION: "AutoModelForTokenClassification",
    Task.QUESTION_ANSWERING: "AutoModelForQuestionAnswering",
    Task.TEXT_SCORING: "AutoModelForCausalLM",
}
"""Class of ``transformers`` that loads a checkpoint for a task; see `model_task` for the others."""

ENCODER_TASKS = tuple(task for task in AUTO_CLASS_OF_TASK if task is not Task.TEXT_SCORING)
"""The tasks of `AUTO_CLASS_OF_TASK` that encoders have, unless their family says otherwise."""

_MADE_OF = {
    Task.SENTENCE_SIMILARITY: Task.FEATURE_EXTRACTION,
    Task.SPARSE_SIMILARITY: Task.FILL_MASK,
    Task.TOKEN_SIMILARITY: Task.FEATURE_EXTRACTION,
}
"""Task that has no class of its own -> that whose model is run, before what `hdexport.checkpoint.heads` adds."""

_TASK_OF_HEAD = (
    # A discriminator: it tells replaced tokens from real ones and fills no mask.
    ("ElectraForPreTraining", Task.FEATURE_EXTRACTION),
    ("ForMaskedLM", Task.FILL_MASK),
    ("ForPreTraining", Task.FILL_MASK),
    ("ForSequenceClassification", Task.TEXT_CLASSIFICATION),
    ("ForTokenClassification", Task.TOKEN_CLASSIFICATION),
    ("ForQuestionAnswering", Task.QUESTION_ANSWERING),
    ("TransfoXLLMHeadModel", Task.TEXT_SCORING),
)
"""Ending of an architecture's name -> task."""


def model_task(task: Task) -> Task:
    """The task of `AUTO_CLASS_OF_TASK` whose model of transformers is run for a task."""
    return _MADE_OF.get(task, task)


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
