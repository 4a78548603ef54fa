"""LlamaIndex's classes."""

from __future__ import annotations

import voyageai
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.cohere import CohereEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.embeddings.voyageai import VoyageEmbedding
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference
from report import GIVEN, finish, received

nodes = [NodeWithScore(node=TextNode(text=text)) for text in GIVEN.documents]


def scores(ranker: object) -> list[float]:
    """The ranker's scores, in the order of the documents."""
    ranked = ranker.postprocess_nodes(nodes, QueryBundle(GIVEN.query))  # type: ignore[attr-defined]
    by_text = {each.node.text: each.score for each in ranked}
    return [by_text[text] for text in GIVEN.documents]


packages = "llama-index-embeddings-text-embeddings-inference"
embeddings = TextEmbeddingsInference(model_name="any", base_url=GIVEN.embedder)
received(packages, "`TextEmbeddingsInference`", "embeddings", embeddings.get_text_embedding_batch(GIVEN.texts))
packages = "llama-index-postprocessor-tei-rerank"
ranker = TextEmbeddingInference(base_url=GIVEN.reranker, top_n=len(nodes))
received(packages, "`TextEmbeddingInference`", "scores", scores(ranker))
packages = "llama-index-embeddings-cohere cohere"
for kind, expected in (("float", "documents"), ("ubinary", "documents ubinary")):
    embeddings = CohereEmbedding(
        api_key="key", base_url=GIVEN.embedder, model_name="embed-english-v3.0", embedding_type=kind
    )
    found = embeddings.get_text_embedding_batch(GIVEN.texts)
    received(packages, f"`CohereEmbedding`, {kind}", expected, found)
found = [embeddings.get_query_embedding(text) for text in GIVEN.texts]
received(packages, "`CohereEmbedding`, queries in ubinary", "queries ubinary", found)
packages = "llama-index-postprocessor-cohere-rerank cohere"
ranker = CohereRerank(api_key="key", base_url=GIVEN.reranker, model="any", top_n=len(nodes))
received(packages, "`CohereRerank`", "scores", scores(ranker))
packages = "llama-index-embeddings-voyageai voyageai"
# The texts of a batch are the chunks of one document.
embeddings = VoyageEmbedding(model_name="voyage-context-3", voyage_api_key="key")
embeddings._client = voyageai.Client(api_key="key", base_url=f"{GIVEN.embedder}/v1")
# It counts tokens with a tokenizer that it downloads.
embeddings._client.tokenize = lambda texts, model: [text.split() for text in texts]
found = [embeddings.get_text_embedding_batch(chunks) for chunks in GIVEN.chunks]
received(packages, "`VoyageEmbedding`, voyage-context-3", "chunks", found)
found = [embeddings.get_query_embedding(text) for text in GIVEN.texts]
received(packages, "`VoyageEmbedding`, queries", "queries", found)
finish()
