"""A bundle behind the interface of LangChain's embeddings.

::

    from hdruntime import SentenceEncoder
    from hdruntime.langchain_embeddings import LangChainEmbeddings

    store = InMemoryVectorStore(LangChainEmbeddings(SentenceEncoder("my-bundle"), normalize_embeddings=True))

LangChain is not needed. Asynchronous methods embed in a thread.
For a vector store that insists on its class: ``Embeddings.register(LangChainEmbeddings)``.
"""

from __future__ import annotations

__all__ = ["LangChainEmbeddings"]

import asyncio
from typing import Any

from hdruntime.sentence_encoder import SentenceEncoder


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
        """One embedding per text: [texts][dimensions]."""
        embeddings: list[list[float]] = self.encoder.encode_document(texts, **self.options).tolist()
        return embeddings

    def embed_query(self, text: str) -> list[float]:
        """The embedding of a query: [dimensions]."""
        embedding: list[float] = self.encoder.encode_query(text, **self.options).tolist()
        return embedding

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """As :meth:`embed_documents`."""
        return await asyncio.to_thread(self.embed_documents, texts)

    async def aembed_query(self, text: str) -> list[float]:
        """As :meth:`embed_query`."""
        return await asyncio.to_thread(self.embed_query, text)
