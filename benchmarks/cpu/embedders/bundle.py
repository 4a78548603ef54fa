"""A bundle in hdruntime; the variant is a backend and a precision, ``openvino int8``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

import hdruntime

PACKAGES = ("hdexport", "openvino", "onnxruntime")


def load(model: Path, *, variant: str, threads: int, max_tokens: int) -> Callable[[np.ndarray], np.ndarray]:
    """A function from ids, [1, tokens], to the embedding, [hidden]."""
    backend, precision = variant.split()
    session = hdruntime.load(model, backend, precision=precision, threads=threads)

    def run(ids: np.ndarray) -> np.ndarray:
        outputs = session(input_ids=ids, attention_mask=np.ones_like(ids))
        return outputs["sentence_embedding"][0]

    return run
