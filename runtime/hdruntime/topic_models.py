"""A bundle as the embedding model of KeyBERT and BERTopic.

::

    from hdruntime import SentenceEncoder
    from hdruntime.topic_models import embedder

    model = embedder(SentenceEncoder("my-bundle"))
    keywords = KeyBERT(model).extract_keywords(text)
    topics, _ = BERTopic(embedding_model=model).fit_transform(texts)

Both libraries take an instance of their own ``BaseEmbedder``, and replace an embedding model of any other unknown class
with a model of their own, without a warning: give them this one, not the encoder.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from hdruntime.arrays import FloatArray
from hdruntime.errors import MissingDependencyError
from hdruntime.sentence_encoder import SentenceEncoder

_LIBRARIES = ("keybert", "bertopic")


def embedder(encoder: SentenceEncoder, **options: Any) -> Any:
    """The encoder as a ``BaseEmbedder`` of the libraries that are installed.

    Args:
        encoder: embeds documents and words, as its `SentenceEncoder.encode` does.
        options: of `SentenceEncoder.encode`, for example ``prompt_name="clustering"``.

    Raises:
        MissingDependencyError: neither KeyBERT nor BERTopic is installed.
    """
    installed = [library for library in _LIBRARIES if importlib.util.find_spec(library) is not None]
    bases = [importlib.import_module(f"{library}.backend").BaseEmbedder for library in installed]
    if not bases:
        raise MissingDependencyError(
            "Neither KeyBERT nor BERTopic is installed.",
            hint="Install one: pip install keybert, or pip install bertopic",
        )

    def embed(self: Any, documents: list[str], verbose: bool = False) -> FloatArray:
        """The embeddings of documents or words: float32 [texts, dimensions]; `verbose` shows the progress."""
        embeddings: FloatArray = encoder.encode(list(documents), show_progress_bar=verbose, **options)
        return embeddings

    return type("BundleEmbedder", tuple(bases), {"embed": embed})(embedding_model=encoder)
