"""The tasks: their names, and what the format of a bundle asks of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hdruntime.bundle.sentence_settings import Kind

Task = Literal[
    "feature-extraction",
    "sentence-similarity",
    "sparse-similarity",
    "token-similarity",
    "fill-mask",
    "text-classification",
    "token-classification",
    "question-answering",
    "text-scoring",
]


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


TASKS: Mapping[str, TaskFormat] = {
    "feature-extraction": TaskFormat(outputs={"last_hidden_state": ("batch", "tokens", "hidden_size")}),
    "sentence-similarity": TaskFormat(
        outputs={
            "last_hidden_state": ("batch", "tokens", "width"),
            "sentence_embedding": ("batch", "embedding_size"),
        },
    ),
    "sparse-similarity": TaskFormat(
        outputs={"sparse_embedding": ("batch", "vocab_size")},
        settings="sparse-encoder",
    ),
    "token-similarity": TaskFormat(
        outputs={"token_embeddings": ("batch", "tokens", "embedding_size")},
        settings="multi-vector-encoder",
        needs_settings=True,
    ),
    "fill-mask": TaskFormat(outputs={"logits": ("batch", "tokens", "vocab_size")}),
    "text-classification": TaskFormat(
        outputs={"logits": ("batch", "labels")},
        settings="cross-encoder",
    ),
    "token-classification": TaskFormat(outputs={"logits": ("batch", "tokens", "labels")}),
    "question-answering": TaskFormat(outputs={"start_logits": ("batch", "tokens"), "end_logits": ("batch", "tokens")}),
    "text-scoring": TaskFormat(outputs={"log_probabilities": ("batch", "tokens")}),
}
