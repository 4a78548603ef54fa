"""Hugging Face's client, with the server's address alone."""

from __future__ import annotations

from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from report import GIVEN, finish, received

client = InferenceClient(GIVEN.embedder)
received("huggingface_hub", "`feature_extraction`", "embeddings", client.feature_extraction(GIVEN.texts).tolist())
options = {"normalize": True, "truncate": True, "truncation_direction": "left", "prompt_name": "query"}
received(
    "huggingface_hub",
    "`feature_extraction`, prompt_name",
    "queries",
    client.feature_extraction(GIVEN.texts, **options).tolist(),
)
source, *others = GIVEN.texts
received("huggingface_hub", "`sentence_similarity`", "cosines", client.sentence_similarity(source, others))
try:
    client.feature_extraction(GIVEN.texts, prompt_name="nobody")
except HfHubHTTPError as error:
    assert "nobody" in str(error)  # noqa: PT017
else:
    raise AssertionError("an unknown prompt was accepted")
client = InferenceClient(GIVEN.classifier)
found = [client.text_classification(text, top_k=4) for text in GIVEN.labelled]
classes = [{each.label: each.score for each in classes} for classes in found]
received("huggingface_hub", "`text_classification`", "classes", classes)
finish()
