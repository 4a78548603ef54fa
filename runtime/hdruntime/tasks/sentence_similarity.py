"""A vector for each text, as sentence-transformers has it."""

from __future__ import annotations

from hdruntime.bundle.task_formats import SentenceSimilarityFormat
from hdruntime.tasks.embedding import Embedding
from hdruntime.tasks.task import Encoder


class SentenceSimilarity(Embedding, SentenceSimilarityFormat):
    """The vector of a text, which the bundle pools as its model does."""

    encoder = Encoder("SentenceEncoder", "SentenceTransformer", "texts", "encode(texts)")


TASK = SentenceSimilarity
