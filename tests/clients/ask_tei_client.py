"""Two clients of text-embeddings-inference."""

from __future__ import annotations

import pytei
import tei_client
from report import GIVEN, finish, in_order, received
from tei_client.models import ModelType

client = tei_client.HttpClient(GIVEN.embedder, timeout=60)
info = client.info()
assert (info.server_model_type, info.server_model_metadata.pooling) == (ModelType.Embedding, "mean")
assert client.prompt_names() == ["query", "document"], client.prompt_names()
received("tei-client", "`embed`", "embeddings", client.embed(GIVEN.texts))
received("tei-client", "`embed`, prompt_name", "queries", client.embed(GIVEN.texts, prompt_name="query"))
received("tei-client", "`embed_all`, normalize False", "states", client.embed_all(GIVEN.texts, normalize=False))
found = client.tokenize(GIVEN.texts)
ids = [each.get_ids() for each in found]
received("tei-client", "`tokenize`", "ids", ids)
received("tei-client", "`embed`, ids", "embeddings", client.embed(ids))
received("tei-client", "`decode`", "decoded", client.decode(ids))
client = tei_client.HttpClient(GIVEN.reranker, timeout=60)
found = client.rerank(GIVEN.query, GIVEN.documents)
received("tei-client", "`rerank`", "scores", in_order(found.ranks, "score"))
client = tei_client.HttpClient(GIVEN.classifier, timeout=60)
found = [{each.label: each.score for each in result.scores} for result in client.classify(GIVEN.labelled)]
received("tei-client", "`classify`", "classes", found)

client = pytei.TEIClient(url=GIVEN.embedder)
received("pytei-client", "`embed`", "embeddings", [each.tolist() for each in client.embed(GIVEN.texts)])
finish()
