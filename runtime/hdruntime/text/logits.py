"""Classes' names, and scores of their logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from hdruntime.bundle.manifest import Manifest


class Activation(StrEnum):
    """How class scores come from logits."""

    SOFTMAX = "softmax"
    """Exactly one class applies."""
    SIGMOID = "sigmoid"
    """Each class applies or not, independently."""
    IDENTITY = "identity"
    """The logits are regression values."""


def labels_of(manifest: Manifest) -> Sequence[str]:
    """Names of the classes in the order of the logits; unnamed ones get transformers' defaults."""
    size = next(spec.shape[-1] for spec in manifest.outputs if spec.name == "logits")
    # A dynamic axis is a name.
    return manifest.labels or [f"LABEL_{index}" for index in range(size if isinstance(size, int) else 0)]


def activated(logits: np.ndarray, activation: Activation) -> np.ndarray:
    """The scores of logits [..., labels], float32; of `Activation.IDENTITY` the logits themselves."""
    return _ACTIVATIONS[activation](logits)


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


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    # In terms of tanh nothing overflows, with any sign.
    return 0.5 * (1 + np.tanh(0.5 * logits.astype(np.float32)))


_ACTIVATIONS: dict[Activation, Callable[[np.ndarray], np.ndarray]] = {
    Activation.SOFTMAX: softmax,
    Activation.SIGMOID: _sigmoid,
    Activation.IDENTITY: lambda logits: logits,
}
