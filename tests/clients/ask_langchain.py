"""LangChain's classes."""

from __future__ import annotations

from langchain_cohere import CohereEmbeddings, CohereRerank
from langchain_openai import OpenAIEmbeddings
from report import GIVEN, finish, in_order, received

packages = "langchain-cohere cohere"
embeddings = CohereEmbeddings(model="any", cohere_api_key="key", base_url=GIVEN.embedder)
received(packages, "`CohereEmbeddings.embed_documents`", "documents", embeddings.embed_documents(GIVEN.texts))
received(packages, "`CohereEmbeddings.embed_query`", "queries", [embeddings.embed_query(text) for text in GIVEN.texts])
ranker = CohereRerank(model="any", cohere_api_key="key", base_url=GIVEN.reranker, top_n=len(GIVEN.documents))
ranked = ranker.rerank(GIVEN.documents, GIVEN.query)
received(packages, "`CohereRerank`", "scores", in_order(ranked))
openai = OpenAIEmbeddings(model="any", api_key="key", base_url=f"{GIVEN.embedder}/v1", check_embedding_ctx_length=False)
received("langchain-openai openai", "`OpenAIEmbeddings`", "embeddings", openai.embed_documents(GIVEN.texts))
finish()
