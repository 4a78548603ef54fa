"""Hybrid search with BGE-M3: compare a question with texts by meaning, by common words, and token by token.

hdexport build BAAI/bge-m3 --task hybrid-similarity --max-len 8192 --allow-pickle -o bge-m3
python examples/bge_m3.py bge-m3
"""

from __future__ import annotations

import argparse
from pathlib import Path

import hdruntime
from hdruntime.text.similarity import maxsim


def scores(query: hdruntime.HybridEmbedding, document: hdruntime.HybridEmbedding) -> tuple[float, float, float]:
    """How alike two texts are by each kind of embedding: the cosine, the common words, and the mean MaxSim."""
    weights = dict(zip(document.sparse.indices.tolist(), document.sparse.values.tolist(), strict=True))
    words = zip(query.sparse.indices.tolist(), query.sparse.values.tolist(), strict=True)
    common = sum(weight * weights.get(token, 0.0) for token, weight in words)
    return float(query.dense @ document.dense), common, float(maxsim(query.colbert, document.colbert, mean=True)[0, 0])


def main() -> None:
    """Compare a question with two texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    options = parser.parse_args()
    texts = ["What is BGE M3?", "BGE M3 is an embedding model.", "BM25 ranks documents by their words."]
    with hdruntime.load(options.bundle) as session:
        query, *documents = session.embed_hybrid(texts, overflow="truncate")
    for text, document in zip(texts[1:], documents, strict=True):
        print(*(f"{score:.4f}" for score in scores(query, document)), text)


if __name__ == "__main__":
    main()
