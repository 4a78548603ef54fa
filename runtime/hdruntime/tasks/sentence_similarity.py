"""A vector for each text, as sentence-transformers has it."""

from __future__ import annotations

from typing import ClassVar

from hdruntime.bundle.manifest import Task
from hdruntime.tasks.embedding import Embedding
from hdruntime.tasks.task import Encoder


class SentenceSimilarity(Embedding):
    """The vector of a text, which the bundle pools as its model does."""

    name = Task.SENTENCE_SIMILARITY
    encoder = Encoder("SentenceEncoder", "SentenceTransformer", "texts", "max_seq_length", "encode(texts)")
    output_axes: ClassVar = {
        "last_hidden_state": ("batch", "tokens", "width"),
        "sentence_embedding": ("batch", "embedding_size"),
    }


TASK = SentenceSimilarity
