"""LiteLLM's providers."""

from __future__ import annotations

import litellm
from report import GIVEN, finish, in_order, received

litellm.telemetry = False
for provider, base, more, expected in (
    ("hosted_vllm", f"{GIVEN.embedder}/v1", {}, "embeddings"),
    ("openai", f"{GIVEN.embedder}/v1", {"encoding_format": "float"}, "embeddings"),
    ("infinity", f"{GIVEN.embedder}/v1", {}, "embeddings"),
    ("jina_ai", f"{GIVEN.embedder}/v1", {}, "embeddings"),
    ("cohere", f"{GIVEN.embedder}/v2/embed", {"input_type": "search_query"}, "queries"),
    ("cohere", f"{GIVEN.embedder}/v1/embed", {"input_type": "search_document"}, "documents"),
    ("huggingface", GIVEN.embedder, {"input_type": "feature-extraction"}, "embeddings"),
):
    found = litellm.embedding(f"{provider}/any", input=GIVEN.texts, api_base=base, api_key="key", **more)
    path = base.removeprefix(GIVEN.embedder)
    received(
        "litellm", f"`embedding`, {provider}/ {path}".strip(), expected, [each["embedding"] for each in found.data]
    )
for provider, more in (
    ("hosted_vllm", {}),
    ("cohere", {}),
    ("jina_ai", {}),
    # infinity's documents are texts, and those of the others objects.
    ("infinity", {"return_documents": False}),
    ("huggingface", {}),
):
    found = litellm.rerank(
        f"{provider}/any",
        query=GIVEN.query,
        documents=GIVEN.documents,
        api_base=GIVEN.reranker,
        api_key="key",
        **more,
    )
    received("litellm", f"`rerank`, {provider}/", "scores", in_order(found.results))
finish()
