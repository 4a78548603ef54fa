"""Requests without a client: those of vLLM's documentation, and Open WebUI's to a reranker.

Open WebUI 0.12.4, open_webui/retrieval/models/external.py.
"""

from __future__ import annotations

import base64
import struct

import openai
import requests
from report import GIVEN, finish, in_order, received


def post(url: str, **body: object) -> dict[str, object]:
    """The answer to a body."""
    response = requests.post(url, json=body, timeout=60)
    response.raise_for_status()
    content: dict[str, object] = response.json()
    return content


found = post(f"{GIVEN.reranker}/score", model="any", text_1=GIVEN.query, text_2=GIVEN.documents)
received("requests", "vLLM's `POST /score`, text_1", "scores", [each["score"] for each in found["data"]])
found = post(f"{GIVEN.reranker}/v1/score", model="any", queries=GIVEN.query, documents=GIVEN.documents)
received("requests", "vLLM's `POST /v1/score`, queries", "scores", [each["score"] for each in found["data"]])
source, *others = GIVEN.texts
found = post(f"{GIVEN.embedder}/score", model="any", text_1=source, text_2=others)
received("requests", "vLLM's `POST /score` of an embedding model", "cosines", [each["score"] for each in found["data"]])
found = post(f"{GIVEN.classifier}/classify", model="any", input=GIVEN.labelled)
received("requests", "vLLM's `POST /classify`", "probabilities", [each["probs"] for each in found["data"]])
for encoding_format in ("float", "base64"):
    found = post(f"{GIVEN.embedder}/pooling", model="any", input=GIVEN.texts, encoding_format=encoding_format)
    rows = [each["data"] for each in found["data"]]
    if encoding_format == "base64":
        decoded = [base64.b64decode(row) for row in rows]
        rows = [struct.unpack(f"<{len(row) // 4}f", row) for row in decoded]
    received("requests", f"vLLM's `POST /pooling`, {encoding_format}", "embeddings", rows)
found = post(f"{GIVEN.embedder}/pooling", model="any", input=GIVEN.texts, task="token_embed")
received("requests", "vLLM's `POST /pooling`, token_embed", "states", [each["data"] for each in found["data"]])
found = [post(f"{GIVEN.embedder}/tokenize", model="any", prompt=text)["tokens"] for text in GIVEN.texts]
received("requests", "vLLM's `POST /tokenize`", "ids", found)
texts = [post(f"{GIVEN.embedder}/detokenize", model="any", tokens=ids)["prompt"] for ids in found]
received("requests", "vLLM's `POST /detokenize`", "decoded with special tokens", texts)

body = {"model": "any", "query": GIVEN.query, "documents": GIVEN.documents, "top_n": len(GIVEN.documents)}
found = post(f"{GIVEN.reranker}/v1/rerank", **body)
received("requests", "Open WebUI 0.12.4's request to a reranker", "scores", in_order(found["results"]))
found = post(f"{GIVEN.reranker}/v1/rerank", **body, return_documents=False)
received("requests", "Jina's `POST /v1/rerank`", "scores", in_order(found["results"]))

client = openai.OpenAI(base_url=f"{GIVEN.embedder}/v1", api_key="key")
found = client.embeddings.create(model="any", input=GIVEN.texts)
received("openai", "`embeddings.create`", "embeddings", [each.embedding for each in found.data])
found = client.embeddings.create(model="any", input=GIVEN.texts, dimensions=64, encoding_format="float")
received("openai", "`embeddings.create`, dimensions", "shorter", [each.embedding for each in found.data])
finish()
