"""Perplexity's client, whose embeddings are int8 or bits in base64."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from perplexity import Perplexity
from report import GIVEN, finish, received

client = Perplexity(api_key="key", base_url=GIVEN.embedder)
model: Any = "pplx-embed-context-v1-0.6b"
for options, dtype, name in (
    ({}, np.int8, "int8"),
    ({"encoding_format": "base64_int8"}, np.int8, "int8"),
    ({"encoding_format": "base64_binary"}, np.uint8, "ubinary"),
):
    said: Any = client.contextualized_embeddings.create(input=GIVEN.chunks, model=model, **options)
    assert [document.index for document in said.data] == [*range(len(GIVEN.chunks))]
    assert said.usage.total_tokens > 0
    found = [
        [np.frombuffer(base64.b64decode(chunk.embedding), dtype).tolist() for chunk in document.data]
        for document in said.data
    ]
    call = f"`contextualized_embeddings.create`, {options.get('encoding_format', 'its default')}"
    received("perplexityai", call, f"plain chunks {name}", found)
model = "pplx-embed-v1-0.6b"
said = client.embeddings.create(input=GIVEN.texts, model=model, encoding_format="base64_binary")
found = [np.frombuffer(base64.b64decode(each.embedding), np.uint8).tolist() for each in said.data]
received("perplexityai", "`embeddings.create`, base64_binary", "ubinary", found)
finish()
