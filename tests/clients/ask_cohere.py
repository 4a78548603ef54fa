"""Cohere's own client, both versions of it."""

from __future__ import annotations

import cohere
from report import GIVEN, finish, in_order, received

TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]


def strict(response: object) -> object:
    """The response, which its model validates: the client itself takes what comes."""
    return type(response).model_validate(response.model_dump(by_alias=True))  # type: ignore[attr-defined]


v1, v2 = (kind("key", base_url=GIVEN.embedder) for kind in (cohere.Client, cohere.ClientV2))
kinds = {"search_query": "queries", "search_document": "documents", "classification": "embeddings"}
for input_type, expected in kinds.items():
    found = strict(v2.embed(model="any", texts=GIVEN.texts, input_type=input_type))
    received("cohere", f"`ClientV2.embed`, {input_type}", expected, found.embeddings.float_)
found = strict(v2.embed(model="any", texts=GIVEN.texts, input_type="clustering", embedding_types=TYPES))
for name in TYPES:
    value = getattr(found.embeddings, "float_" if name == "float" else name)
    expected = "embeddings" if name == "float" else name
    received("cohere", f"`ClientV2.embed`, {name}", expected, value)
assert found.texts == GIVEN.texts
assert found.meta.billed_units.input_tokens > len(GIVEN.texts)
inputs = [{"content": [{"type": "text", "text": text}]} for text in GIVEN.texts]
found = strict(v2.embed(model="any", inputs=inputs, input_type="clustering"))
received("cohere", "`ClientV2.embed`, inputs", "embeddings", found.embeddings.float_)
found = v2.embed(model="any", texts=GIVEN.texts, input_type="clustering", output_dimension=64)
received("cohere", "`ClientV2.embed`, output_dimension", "shorter", found.embeddings.float_)
for truncate in ("START", "END"):
    found = v2.embed(model="any", texts=GIVEN.texts, input_type="clustering", truncate=truncate, max_tokens=16)
    received("cohere", f"`ClientV2.embed`, truncate {truncate}", truncate, found.embeddings.float_)
try:
    v2.embed(model="any", texts=GIVEN.texts, input_type="clustering", truncate="NONE", max_tokens=16)
except cohere.BadRequestError as error:
    assert "16" in error.body["message"]  # noqa: PT017
else:
    raise AssertionError("a text of too many tokens was accepted")

found = strict(v1.embed(texts=GIVEN.texts))
assert found.response_type == "embeddings_floats"
received("cohere", "`Client.embed`", "embeddings", found.embeddings)
found = v1.embed(texts=GIVEN.many, input_type="classification", embedding_types=["float", "int8"])
assert found.response_type == "embeddings_by_type"
received("cohere", "`Client.embed`, 200 texts in three requests", "many", found.embeddings.float_)
received("cohere", "`Client.embed`, 200 texts, int8", "many int8", found.embeddings.int8)

v1, v2 = (kind("key", base_url=GIVEN.reranker) for kind in (cohere.Client, cohere.ClientV2))
for client, name in ((v1, "Client"), (v2, "ClientV2")):
    ranked = strict(client.rerank(model="any", query=GIVEN.query, documents=GIVEN.documents))
    received("cohere", f"`{name}.rerank`", "scores", in_order(ranked.results))
finish()
