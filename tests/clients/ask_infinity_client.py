"""infinity's client."""

from __future__ import annotations

from infinity_client import Client
from infinity_client.api.default import classify, embeddings, rerank
from infinity_client.models import ClassifyInput, OpenAIEmbeddingInputText, RerankInput
from report import GIVEN, finish, in_order, received

client = Client(base_url=f"{GIVEN.embedder}/v1")
found = embeddings.sync(client=client, body=OpenAIEmbeddingInputText.from_dict({"input": GIVEN.texts, "model": "any"}))
received("infinity_client", "`embeddings`", "embeddings", [each.embedding for each in found.data])
client = Client(base_url=f"{GIVEN.reranker}/v1")
found = rerank.sync(client=client, body=RerankInput(query=GIVEN.query, documents=GIVEN.documents))
received("infinity_client", "`rerank`", "scores", in_order([each.to_dict() for each in found.results]))
client = Client(base_url=f"{GIVEN.classifier}/v1")
found = classify.sync(client=client, body=ClassifyInput(input_=GIVEN.labelled))
classes = [{each.label: each.score for each in classes} for classes in found.data]
received("infinity_client", "`classify`", "classes", classes)
finish()
