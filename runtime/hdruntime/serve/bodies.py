"""Bodies of requests, as OpenAI, Cohere, Jina and text-embeddings-inference have them.

A key that is not here would change the answer that its author expects, so it is refused.
"""

from __future__ import annotations

__all__ = ["EmbedBody", "EmbeddingsBody", "PredictBody", "RerankBody", "SparseBody"]

from typing import Any, Literal

import msgspec

from hdruntime.serve.answering import Truncate


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The keys of every body; the first two change no answer."""

    model: str | None = None
    user: str | None = None
    truncate: Truncate | bool = "error"


class EmbeddingsBody(_Body, kw_only=True):
    """``POST /v1/embeddings``; the last two and `truncate` are no keys of OpenAI."""

    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    prompt_name: str | None = None
    late_chunking: bool = False


class RerankBody(_Body, kw_only=True):
    """``POST /rerank``: Cohere's and Jina's keys, and those of text-embeddings-inference (`texts`)."""

    query: str
    documents: list[str | dict[str, Any]] | None = None
    texts: list[str] | None = None
    top_n: int | None = None
    return_documents: bool = False
    return_text: bool = False
    raw_scores: bool = False
    truncate: Truncate | bool = "end"
    truncation_direction: Literal["Right"] = "Right"


class SparseBody(_Body, kw_only=True):
    """``POST /embed_sparse`` of text-embeddings-inference."""

    inputs: str | list[str]
    truncation_direction: Literal["Right"] = "Right"
    prompt_name: str | None = None


class EmbedBody(SparseBody, kw_only=True):
    """``POST /embed`` of text-embeddings-inference."""

    normalize: bool = True
    dimensions: int | None = None


class PredictBody(_Body, kw_only=True):
    """``POST /predict`` of text-embeddings-inference: a text, a pair, or a list of either."""

    inputs: Any
    raw_scores: bool = False
    truncation_direction: Literal["Right"] = "Right"
