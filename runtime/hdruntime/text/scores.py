"""Scores from logits."""

from __future__ import annotations

__all__ = ["shortest", "softmax"]

from typing import Any

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, in float32: no logit is too large, since the largest is subtracted first."""
    # A logit so far below the largest that the difference overflows has a share of zero, as it should.
    with np.errstate(over="ignore"):
        shifted = logits.astype(np.float32) - logits.max(axis=-1, keepdims=True).astype(np.float32)
    exponentials = np.exp(shifted)
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def shortest(value: np.floating[Any]) -> float:
    """The float with the fewest digits that is this float32; 0.1 rather than 0.10000000149011612."""
    return float(str(np.float32(value)))
