"""KeyBERT and BERTopic with a bundle: their own base class, and the keywords and topics of sentence-transformers.

`make test` puts both in a folder of its own, so each test is a process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hdruntime import SentenceEncoder
from hdruntime.errors import MissingDependencyError
from hdruntime.topic_models import embedder

TOPIC_MODELS = Path(sys.prefix) / "topic-models"

SAME_AS_THE_LIBRARY = """
import sys

bundle, checkpoint, folder = sys.argv[1:]
sys.path.append(folder)

import numpy as np
from bertopic import BERTopic
from bertopic.backend._utils import select_backend
from bertopic.dimensionality import BaseDimensionalityReduction
from keybert import KeyBERT
from sentence_transformers import SentenceTransformer
from sklearn.cluster import KMeans

from hdruntime import SentenceEncoder
from hdruntime.topic_models import embedder

library = SentenceTransformer(checkpoint, device="cpu")
texts = ["The river flows through the city.", "A book about rivers and bridges.", "Who wrote the book?",
         "Nobody reads this book twice.", "The bridge over the river is old."] * 4
with SentenceEncoder(bundle) as encoder:
    ours = embedder(encoder)
    assert select_backend(ours) is ours
    np.testing.assert_allclose(ours.embed_words(texts), library.encode(texts), atol=1e-5)
    found, expected = (KeyBERT(model).extract_keywords(texts[1], top_n=4) for model in (ours, library))
    assert [word for word, _ in found] == [word for word, _ in expected], (found, expected)
    np.testing.assert_allclose([s for _, s in found], [s for _, s in expected], atol=2e-4)
    options = {"umap_model": BaseDimensionalityReduction(), "hdbscan_model": KMeans(3, random_state=0)}
    topics = [BERTopic(embedding_model=model, **options).fit_transform(texts)[0] for model in (ours, library)]
    assert topics[0] == topics[1]
"""


@pytest.mark.skipif(not TOPIC_MODELS.is_dir(), reason=f"{TOPIC_MODELS} is missing: `make test` fills it")
def test_keywords_and_topics_are_those_of_sentence_transformers(sample_bundle: Path, sample: Path) -> None:
    command = [sys.executable, "-c", SAME_AS_THE_LIBRARY, str(sample_bundle), str(sample), str(TOPIC_MODELS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_the_libraries_the_error_says_what_to_install(bundle_path: Path) -> None:
    with (
        SentenceEncoder(bundle_path) as encoder,
        pytest.raises(MissingDependencyError, match=r"Neither KeyBERT nor BERTopic .*\nInstall one of them: pip "),
    ):
        embedder(encoder)
