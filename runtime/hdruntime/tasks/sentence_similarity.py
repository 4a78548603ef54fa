"""A vector for each text, as sentence-transformers has it."""

from __future__ import annotations

from typing import ClassVar

from hdruntime.bundle.task_formats import Task
from hdruntime.tasks.embedding import Embedding


class SentenceSimilarity(Embedding):
    """The vector of a text, which the bundle pools as its model does."""

    name = Task.SENTENCE_SIMILARITY
    output_axes: ClassVar = {
        "last_hidden_state": ("batch", "tokens", "width"),
        "sentence_embedding": ("batch", "embedding_size"),
    }


TASK = SentenceSimilarity
