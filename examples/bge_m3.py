"""The three vectors of BGE-M3 from one bundle: of the text, of the words in it, and of each token.

    hdexport build BAAI/bge-m3 --max-len 8192 -o bge-m3
    python examples/bge_m3.py bge-m3 PATH/TO/THE/CHECKPOINT

The graph gives the text's vector and the encoder's states of all tokens. The two other heads are a matrix each,
`sparse_linear.pt` and `colbert_linear.pt` of the checkpoint, which NumPy multiplies.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import hdruntime


class Head(NamedTuple):
    """A layer: [width, hidden_size], and [width]."""

    weight: np.ndarray
    bias: np.ndarray

    def __call__(self, states: np.ndarray) -> np.ndarray:
        """[tokens, width], float32, from [tokens, hidden_size]."""
        return states @ self.weight.T + self.bias


class Vectors(NamedTuple):
    """What BGE-M3 knows of a text.

    Attributes:
        dense: [hidden_size], of length 1.
        sparse: id of a token -> its weight, above 0; without the tokenizer's special tokens.
        tokens: [tokens - 1, width], each of length 1: one for each token but the first.
    """

    dense: np.ndarray
    sparse: dict[int, float]
    tokens: np.ndarray


def head(file: Path) -> Head:
    """The layer in a file of the checkpoint; nothing but tensors is unpickled."""
    weights = torch.load(file, map_location="cpu", weights_only=True)
    return Head(weights["weight"].float().numpy(), weights["bias"].float().numpy())


def encode(session: hdruntime.Session, sparse: Head, colbert: Head, texts: Sequence[str]) -> list[Vectors]:
    """The vectors of texts, which are cut to what the bundle reads."""
    special = {*session.tokenize([""])[0].input_ids, session.manifest.tokenizer.unk_token_id}
    found = []
    for encoding in session.tokenize(texts, overflow="truncate"):
        outputs = session(input_ids=np.array([encoding.input_ids]))
        (states,), (dense,) = outputs["last_hidden_state"], outputs["sentence_embedding"]
        weights: dict[int, float] = {}
        for token, weight in zip(encoding.input_ids, sparse(states)[:, 0].tolist(), strict=True):
            if token not in special and weight > weights.get(token, 0.0):
                weights[token] = weight
        tokens = colbert(states[1:])
        found.append(Vectors(dense, weights, tokens / np.linalg.norm(tokens, axis=1, keepdims=True)))
    return found


def scores(query: Vectors, document: Vectors) -> tuple[float, float, float]:
    """How alike two texts are by each kind of vector: the cosine, the common words, and MaxSim for each token."""
    common = sum(weight * document.sparse.get(token, 0.0) for token, weight in query.sparse.items())
    best = (query.tokens @ document.tokens.T).max(axis=1)
    return float(query.dense @ document.dense), common, float(best.mean())


def main() -> None:
    """Compare a question with two texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("checkpoint", type=Path)
    options = parser.parse_args()
    sparse, colbert = (head(options.checkpoint / f"{name}_linear.pt") for name in ("sparse", "colbert"))
    texts = ["What is BGE M3?", "BGE M3 is an embedding model.", "BM25 ranks documents by their words."]
    with hdruntime.load(options.bundle) as session:
        query, *documents = encode(session, sparse, colbert, texts)
    for text, document in zip(texts[1:], documents, strict=True):
        print(*(f"{score:.4f}" for score in scores(query, document)), text)


if __name__ == "__main__":
    main()
