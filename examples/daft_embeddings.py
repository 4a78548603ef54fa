"""Embed a column of a Daft data frame: a bundle as a provider of `embed_text`.

    pip install daft
    python examples/daft_embeddings.py BUNDLE TEXTS.parquet VECTORS/

BUNDLE gives embeddings. On a cluster it is at the same path on every node, or a name on the Hugging Face Hub.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

import daft
import numpy as np
from daft.ai.protocols import TextEmbedder, TextEmbedderDescriptor
from daft.ai.provider import Provider
from daft.ai.typing import EmbeddingDimensions
from daft.functions import embed_text

import hdruntime


class BundleProvider(Provider):
    """Bundles as models: ``embed_text(column, provider=BundleProvider(), model="BUNDLE")``."""

    @property
    def name(self) -> str:
        """Daft's name of the provider."""
        return "hdexport"

    def get_text_embedder(
        self, model: str | None = None, dimensions: int | None = None, **options: Any
    ) -> BundleFactory:
        """Describe a bundle; a worker loads the bundle."""
        if model is None:
            raise ValueError("Name the bundle: embed_text(..., model='BUNDLE')")
        return BundleFactory(model, dimensions, options)


@dataclass
class BundleFactory(TextEmbedderDescriptor):
    """Loads a bundle in a worker.

    Attributes:
        bundle: its directory, or its name on the hub.
        dimensions: that are kept of the vectors; None for all.
        options: Daft's, of the calls.
    """

    bundle: str
    dimensions: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def get_provider(self) -> str:
        return "hdexport"

    def get_model(self) -> str:
        return self.bundle

    def get_options(self) -> dict[str, Any]:
        return dict(self.options)

    def get_dimensions(self) -> EmbeddingDimensions:
        # Of one vector: the data frame's type is known before any worker runs.
        size = self.dimensions or len(self.instantiate().embed_text(["a"])[0])
        return EmbeddingDimensions(size=size, dtype=daft.DataType.float32())

    def instantiate(self) -> BundleEmbedder:
        return BundleEmbedder(self.bundle, self.dimensions)


class BundleEmbedder(TextEmbedder):
    """A loaded bundle in a worker."""

    def __init__(self, bundle: str, dimensions: int | None) -> None:
        self.encoder = hdruntime.SentenceEncoder(bundle, truncate_dim=dimensions)

    def embed_text(self, text: list[str]) -> list[np.ndarray]:
        return list(self.encoder.encode(text))


def main() -> None:
    """Embed the column `text` of Parquet files, and write them with the column `embedding`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("texts")
    parser.add_argument("vectors")
    options = parser.parse_args()
    texts = daft.read_parquet(options.texts)
    embedding = embed_text(texts["text"], provider=BundleProvider(), model=options.bundle)
    texts.with_column("embedding", embedding).write_parquet(options.vectors)


if __name__ == "__main__":
    main()
