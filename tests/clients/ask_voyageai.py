"""Voyage's client."""

from __future__ import annotations

import asyncio
from typing import Any

import voyageai
from report import GIVEN, finish, received

address = {"api_key": "key", "base_url": f"{GIVEN.embedder}/v1"}
client = voyageai.Client(**address)
found = client.embed(GIVEN.texts, model="any", input_type="query", truncation=True)
received("voyageai", "`Client.embed`", "queries", found.embeddings)
found = client.embed(GIVEN.texts, model="any", input_type="document", output_dtype="ubinary")
received("voyageai", "`Client.embed`, ubinary", "documents ubinary", found.embeddings)


def chunks(**options: Any) -> list[Any]:
    """The embeddings of the chunks of each document."""
    said = client.contextualized_embed(GIVEN.chunks, model="any", input_type="document", **options)
    return [document.embeddings for document in said.results]


call = "`Client.contextualized_embed`"
received("voyageai", call, "chunks", chunks())
for dtype in ("int8", "uint8", "binary", "ubinary"):
    received("voyageai", f"{call}, {dtype}", f"chunks {dtype}", chunks(output_dtype=dtype))
said = client.contextualized_embed(GIVEN.texts, model="any", input_type="query")
received("voyageai", f"{call}, queries", "queries", [document.embeddings[0] for document in said.results])
divided = client.contextualized_embed(
    [[GIVEN.texts[-1]]], model="any", input_type="document", enable_auto_chunking=True, chunk_size=100
)
assert [" ".join(texts) for texts in divided.chunk_texts or []] == [GIVEN.texts[-1].strip()]
received("voyageai", f"{call}, enable_auto_chunking", "divided", divided.results[0].embeddings)
said = asyncio.run(voyageai.AsyncClient(**address).contextualized_embed(GIVEN.chunks, "any", "document"))
received("voyageai", "`AsyncClient.contextualized_embed`", "chunks", [each.embeddings for each in said.results])
refused = ""
try:
    client.contextualized_embed([["a", " "]], model="any", input_type="document")
except voyageai.error.VoyageError as error:
    refused = str(error)
assert "has no token" in refused
finish()
