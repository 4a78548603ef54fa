"""A bundle behind the interface of LangChain's embeddings.

::

    from hdruntime import SentenceEncoder
    from hdruntime.langchain_embeddings import LangChainEmbeddings

    store = InMemoryVectorStore(LangChainEmbeddings(SentenceEncoder("my-bundle"), normalize_embeddings=True))

LangChain is not needed. Where langchain-core is installed, this module imports it, and the class is registered as a
subclass of ``langchain_core.embeddings.Embeddings``, which vector stores ask for. Asynchronous methods embed in a
thread.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from hdruntime.errors import InputError
from hdruntime.sentence_encoder import SentenceEncoder
from hdruntime.text.checks import checked_texts


class LangChainEmbeddings:
    """Embeds documents and queries, each with the prompt that the model has for it.

    Args:
        encoder: that embeds.
        options: passed on to `SentenceEncoder.encode_document` and `SentenceEncoder.encode_query`.
    """

    def __init__(self, encoder: SentenceEncoder, **options: Any) -> None:
        self.encoder = encoder
        self.options = options

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One embedding per text: [texts][dimensions].

        Raises:
            InputError: `texts` is one string, or no list of strings; or as `SentenceEncoder.encode`.
        """
        texts = checked_texts(texts, name="texts")
        embeddings: list[list[float]] = self.encoder.encode_document(texts, **self.options).tolist()
        return embeddings

    def embed_query(self, text: str) -> list[float]:
        """The embedding of a query: [dimensions].

        Raises:
            InputError: `text` is not one string; or as `SentenceEncoder.encode`.
        """
        if not isinstance(text, str):
            raise InputError(
                f"text is of type {type(text).__name__}; it must be one string.",
                hint="For several queries: [embeddings.embed_query(text) for text in texts]",
            )
        embedding: list[float] = self.encoder.encode_query(text, **self.options).tolist()
        return embedding

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """As :meth:`embed_documents`."""
        return await asyncio.to_thread(self.embed_documents, texts)

    async def aembed_query(self, text: str) -> list[float]:
        """As :meth:`embed_query`."""
        return await asyncio.to_thread(self.embed_query, text)


def _register() -> None:
    """Make the class one of LangChain's, where LangChain is installed; a registration works in any order of imports."""
    try:
        theirs = importlib.import_module("langchain_core.embeddings")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "langchain_core":
            raise
    else:
        theirs.Embeddings.register(LangChainEmbeddings)


_register()
