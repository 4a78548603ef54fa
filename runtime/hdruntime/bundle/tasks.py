"""The tasks: what each is called, and the outputs that its graphs have."""

from __future__ import annotations

__all__ = ["OUTPUTS_OF_TASK", "Task"]

from collections.abc import Mapping
from typing import Literal

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

OUTPUTS_OF_TASK: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "feature-extraction": {"last_hidden_state": ("batch", "tokens", "hidden_size")},
    "sentence-similarity": {
        "token_embeddings": ("batch", "tokens", "hidden_size"),
        "sentence_embedding": ("batch", "embedding_size"),
    },
    "sparse-similarity": {"sparse_embedding": ("batch", "vocab_size")},
    "token-similarity": {"token_embeddings": ("batch", "tokens", "embedding_size")},
    "fill-mask": {"logits": ("batch", "tokens", "vocab_size")},
    "text-classification": {"logits": ("batch", "labels")},
    "token-classification": {"logits": ("batch", "tokens", "labels")},
    "question-answering": {"start_logits": ("batch", "tokens"), "end_logits": ("batch", "tokens")},
    "text-scoring": {"log_probabilities": ("batch", "tokens")},
}
"""Task -> name of each output that it needs -> its axes. All outputs are float32; a graph may have others beside these,
which are inputs of the next call."""
