"""The checkpoint in sentence-transformers; the variant is a dtype of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import sentence_transformers
import torch

PACKAGES = ("sentence-transformers", "transformers", "torch")


def load(model: Path, *, variant: str, threads: int, max_tokens: int) -> Callable[[np.ndarray], np.ndarray]:
    """A function from ids, [1, tokens], to the embedding, [hidden]."""
    torch.set_num_threads(threads)
    dtype = getattr(torch, variant)
    encoder = sentence_transformers.SentenceTransformer(str(model), model_kwargs={"dtype": dtype}, device="cpu")

    def run(ids: np.ndarray) -> np.ndarray:
        rows = torch.from_numpy(ids)
        with torch.inference_mode():
            found = encoder({"input_ids": rows, "attention_mask": torch.ones_like(rows)})
        return found["sentence_embedding"][0].float().numpy()

    return run
