"""Haystack's components of Cohere and vLLM."""

from __future__ import annotations

import os

from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.embedders.cohere import (
    CohereDocumentEmbedder,
    CohereTextEmbedder,
)
from haystack_integrations.components.embedders.vllm import VLLMDocumentEmbedder
from haystack_integrations.components.rankers.cohere import CohereRanker
from haystack_integrations.components.rankers.vllm import VLLMRanker
from report import GIVEN, finish, received

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
key = Secret.from_token("key")
documents = [Document(content=text) for text in GIVEN.texts]
ranked = [Document(content=text) for text in GIVEN.documents]


def scores(ranker: object) -> list[float]:
    """The ranker's scores, in the order of the documents."""
    found = ranker.run(query=GIVEN.query, documents=ranked)["documents"]  # type: ignore[attr-defined]
    by_text = {each.content: each.score for each in found}
    return [by_text[text] for text in GIVEN.documents]


packages = "cohere-haystack cohere"
embedder = CohereDocumentEmbedder(api_key=key, model="any", api_base_url=GIVEN.embedder, progress_bar=False)
found = [each.embedding for each in embedder.run(documents)["documents"]]
received(packages, "`CohereDocumentEmbedder`", "documents", found)
embedder = CohereTextEmbedder(api_key=key, model="any", api_base_url=GIVEN.embedder)
found = [embedder.run(text)["embedding"] for text in GIVEN.texts]
received(packages, "`CohereTextEmbedder`", "queries", found)
ranker = CohereRanker(api_key=key, model="any", api_base_url=GIVEN.reranker, top_k=len(ranked))
received(packages, "`CohereRanker`", "scores", scores(ranker))
packages = "vllm-haystack haystack-ai"
embedder = VLLMDocumentEmbedder(model="any", api_key=key, api_base_url=f"{GIVEN.embedder}/v1", progress_bar=False)
found = [each.embedding for each in embedder.run(documents)["documents"]]
received(packages, "`VLLMDocumentEmbedder`", "embeddings", found)
ranker = VLLMRanker(model="any", api_key=key, api_base_url=f"{GIVEN.reranker}/v1", top_k=len(ranked))
received(packages, "`VLLMRanker`", "scores", scores(ranker))
finish()
