"""The tasks: their names, and what the format of a bundle asks of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hdruntime.bundle.sentence_settings import Kind
from hdruntime.bundle.value_types import Choice


class Task(Choice):
    """The task of a bundle, by the name in Hugging Face optimum, where it has one."""

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
    """The log-probability of each token after the tokens before it."""


@dataclass(frozen=True, kw_only=True)
class TaskFormat:
    """The format of a task's bundles.

    Attributes:
        outputs: name of each output that it needs -> its axes. All outputs are float32; a graph may have others beside
            these, which are inputs of the next call. An axis ``hidden_size`` is the manifest's.
        settings: kind of its settings of sentence-transformers.
        needs_settings: whether nothing can be made of its outputs without them.
    """

    outputs: Mapping[str, tuple[str, ...]]
    settings: Kind = "encoder"
    needs_settings: bool = False


TASKS: Mapping[Task, TaskFormat] = {
    Task.FEATURE_EXTRACTION: TaskFormat(outputs={"last_hidden_state": ("batch", "tokens", "hidden_size")}),
    Task.SENTENCE_SIMILARITY: TaskFormat(
        outputs={
            "last_hidden_state": ("batch", "tokens", "width"),
            "sentence_embedding": ("batch", "embedding_size"),
        },
    ),
    Task.SPARSE_SIMILARITY: TaskFormat(
        outputs={"sparse_embedding": ("batch", "vocab_size")},
        settings="sparse-encoder",
    ),
    Task.TOKEN_SIMILARITY: TaskFormat(
        outputs={"token_embeddings": ("batch", "tokens", "embedding_size")},
        settings="multi-vector-encoder",
        needs_settings=True,
    ),
    Task.FILL_MASK: TaskFormat(outputs={"logits": ("batch", "tokens", "vocab_size")}),
    Task.TEXT_CLASSIFICATION: TaskFormat(
        outputs={"logits": ("batch", "labels")},
        settings="cross-encoder",
    ),
    Task.TOKEN_CLASSIFICATION: TaskFormat(outputs={"logits": ("batch", "tokens", "labels")}),
    Task.QUESTION_ANSWERING: TaskFormat(
        outputs={"start_logits": ("batch", "tokens"), "end_logits": ("batch", "tokens")}
    ),
    Task.TEXT_SCORING: TaskFormat(outputs={"log_probabilities": ("batch", "tokens")}),
}
