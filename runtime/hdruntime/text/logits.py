"""Converts a task's raw outputs for one row to a class, tokens for masks or a text's probability."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from hdruntime.errors import InputError
from hdruntime.text.tokenization import Encoding

FILL_MASK_CHOICES = 5
"""Tokens suggested for each mask, as in Hugging Face's fill-mask pipeline."""


class Activation(str, Enum):
    """How class scores come from logits."""

    SOFTMAX = "softmax"
    """Exactly one class applies."""
    SIGMOID = "sigmoid"
    """Each class applies or not, independently."""
    IDENTITY = "identity"
    """The logits are regression values."""


@dataclass(frozen=True)
class Classification:
    """The best class of a text, and the score of every class in the order of the labels."""

    label: str
    score: float
    scores: dict[str, float]


@dataclass(frozen=True)
class Filling:
    """A candidate token for a mask."""

    token: str
    token_id: int
    score: float


@dataclass(frozen=True)
class TextScore:
    """How probable a text is: its log-probability, the perplexity of a token, and each token's log-probability.

    The first token has 0 and does not count: nothing predicts it. A text of one token has no perplexity, None.
    """

    log_probability: float
    perplexity: float | None
    log_probabilities: list[float]


def classification(
    logits: np.ndarray, labels: Sequence[str], *, activation: Activation = Activation.SOFTMAX
) -> Classification:
    """The class of a text.

    Args:
        logits: [labels], float32.
        labels: [labels], names.
        activation: how the model was trained; decides the scores, never the label.
    """
    scores = activated(logits, activation)
    best = int(np.argmax(logits))
    return Classification(
        label=labels[best],
        score=shortest(scores[best]),
        scores={name: shortest(score) for name, score in zip(labels, scores, strict=True)},
    )


def fillings(
    logits: np.ndarray,
    *,
    mask_token_id: int,
    spelling: Callable[[int], str],
    encoding: Encoding,
) -> list[list[Filling]]:
    """The `FILL_MASK_CHOICES` best tokens for every mask of a text, best first.

    Args:
        logits: [tokens, vocab_size], float32.
        mask_token_id: the id of the mask.
        spelling: id -> how the token is written.
        encoding: the text's tokens.

    Raises:
        InputError: the text has no mask.
    """
    masks = np.flatnonzero(np.asarray(encoding.input_ids) == mask_token_id)
    if not len(masks):
        raise InputError(f"The text has no mask to fill.\nWrite {spelling(mask_token_id)} in place of a word.")
    return [_best_tokens(softmax(logits[mask]), spelling) for mask in masks]


def text_score(log_probabilities: np.ndarray) -> TextScore:
    """How probable a text is.

    Args:
        log_probabilities: [tokens], float32, 0 for the first.
    """
    total, predicted = float(log_probabilities.sum(dtype=np.float64)), len(log_probabilities) - 1
    with np.errstate(over="ignore"):
        perplexity = float(np.exp(-total / predicted)) if predicted > 0 else None
    return TextScore(total, perplexity, [shortest(value) for value in log_probabilities])


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


def _best_tokens(scores: np.ndarray, spelling: Callable[[int], str]) -> list[Filling]:
    # A stable sort of the negated scores: of equally probable tokens the one with the smaller id comes first.
    best = np.argsort(-scores, kind="stable")[:FILL_MASK_CHOICES]
    return [Filling(spelling(int(token)), int(token), shortest(scores[token])) for token in best]
