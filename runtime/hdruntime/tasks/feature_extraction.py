"""Vectors of a text's tokens, pooled here to one for the text."""

from __future__ import annotations

from hdruntime.bundle.manifest import Task
from hdruntime.tasks.embedding import Embedding
from hdruntime.tasks.task import Encoder


class FeatureExtraction(Embedding):
    """The vector of a text, the mean of its tokens' vectors unless the caller chooses another pooling."""

    name = Task.FEATURE_EXTRACTION
    encoder = Encoder("SentenceEncoder", "SentenceTransformer", "texts", None)


TASK = FeatureExtraction
