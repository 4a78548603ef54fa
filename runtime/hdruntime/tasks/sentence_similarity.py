"""A vector for each text, as sentence-transformers has it."""

from __future__ import annotations

from hdruntime.bundle.manifest import Task
from hdruntime.tasks.embedding import Embedding
from hdruntime.tasks.task import Encoder


class SentenceSimilarity(Embedding):
    """The vector of a text, which the bundle pools as its model does."""

    name = Task.SENTENCE_SIMILARITY
    encoder = Encoder("SentenceEncoder", "SentenceTransformer", "texts", "encode(texts)")


TASK = SentenceSimilarity
