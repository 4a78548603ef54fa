"""A bundle as the embedding model of KeyBERT and BERTopic.

::

    from hdruntime import SentenceEncoder
    from hdruntime.topic_models import embedder

    model = embedder(SentenceEncoder("my-bundle"))
    keywords = KeyBERT(model).extract_keywords(text)
    topics, _ = BERTopic(embedding_model=model).fit_transform(texts)

KeyBERT and BERTopic accept an instance of their ``BaseEmbedder``, and replace an embedding model of an unknown class
with their default model, without a warning: pass the embedder, not the encoder.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from hdruntime.arrays import FloatArray
from hdruntime.errors import MissingDependencyError
from hdruntime.sentence_encoder import SentenceEncoder

_PACKAGES = ("keybert", "bertopic")


def embedder(encoder: SentenceEncoder, **options: Any) -> Any:
    """An encoder as the ``BaseEmbedder`` of KeyBERT and BERTopic, as far as they are installed.

    Args:
        encoder: embeds documents and words.
        options: options of `SentenceEncoder.encode`, for example ``prompt_name="clustering"``.

    Raises:
        MissingDependencyError: neither KeyBERT nor BERTopic is installed.
    """
    installed = [package for package in _PACKAGES if importlib.util.find_spec(package) is not None]
    bases = [importlib.import_module(f"{package}.backend").BaseEmbedder for package in installed]
    if not bases:
        raise MissingDependencyError(
            "Neither KeyBERT nor BERTopic is installed.",
            hint="Install one of them: pip install keybert, or pip install bertopic",
        )

    def embed(self: Any, documents: list[str], verbose: bool = False) -> FloatArray:
        """Embeddings of documents or words, float32 [texts, dimensions]; `verbose` shows a progress bar."""
        return encoder.encode(list(documents), show_progress_bar=verbose, **options)

    return type("BundleEmbedder", tuple(bases), {"embed": embed})(embedding_model=encoder)
