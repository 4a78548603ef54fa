"""A bundle behind the interface of LangChain's embeddings.

::

    from hdruntime import SentenceEncoder
    from hdruntime.langchain_embeddings import LangChainEmbeddings

    store = InMemoryVectorStore(LangChainEmbeddings(SentenceEncoder("my-bundle"), normalize_embeddings=True))

LangChain is optional. If langchain-core is installed, the class is registered as a subclass of
``langchain_core.embeddings.Embeddings``, which vector stores check. Asynchronous methods embed in a thread.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from hdruntime.errors import InputError
from hdruntime.sentence_encoder import SentenceEncoder
from hdruntime.text.checks import checked_texts


class LangChainEmbeddings:
    """LangChain's embeddings of an encoder, with the model's prompts for documents and queries.

    Args:
        encoder: embeds the texts.
        options: options of `SentenceEncoder.encode_document` and `SentenceEncoder.encode_query`.
    """

    def __init__(self, encoder: SentenceEncoder, **options: Any) -> None:
        self.encoder = encoder
        self.options = options

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One embedding per text: [texts][dimensions].

        Raises:
            InputError: `texts` is not a list of strings; see `SentenceEncoder.encode` for others.
        """
        texts = checked_texts(texts, name="texts")
        return self.encoder.encode_document(texts, **self.options).tolist()

    def embed_query(self, text: str) -> list[float]:
        """The embedding of a query: [dimensions].

        Raises:
            InputError: `text` is not a string; see `SentenceEncoder.encode` for others.
        """
        if not isinstance(text, str):
            raise InputError(
                f"text is of type {type(text).__name__}; it must be one string.",
                hint="For several queries: [embeddings.embed_query(text) for text in texts]",
            )
        return self.encoder.encode_query(text, **self.options).tolist()

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """Call :meth:`embed_documents` in a thread."""
        return await asyncio.to_thread(self.embed_documents, texts)

    async def aembed_query(self, text: str) -> list[float]:
        """Call :meth:`embed_query` in a thread."""
        return await asyncio.to_thread(self.embed_query, text)


def _register() -> None:
    """Register the class with LangChain, if LangChain is installed; the order of imports does not matter."""
    try:
        langchain = importlib.import_module("langchain_core.embeddings")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "langchain_core":
            raise
    else:
        langchain.Embeddings.register(LangChainEmbeddings)


_register()
