"""Converts a task's raw outputs for one row to a class, entities, an answer or tokens for masks."""

from __future__ import annotations

__all__ = [
    "FILL_MASK_CHOICES",
    "MAX_ANSWER_TOKENS",
    "Activation",
    "Aggregation",
    "Answer",
    "Classification",
    "Entity",
    "Filling",
    "TextScore",
    "answer",
    "classification",
    "continued_words",
    "entities",
    "fillings",
    "softmax",
    "text_score",
]

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from hdruntime.errors import InputError
from hdruntime.text.tokenization import Encoding

FILL_MASK_CHOICES = 5
"""Tokens suggested for each mask, as in Hugging Face's fill-mask pipeline."""

MAX_ANSWER_TOKENS = 30
"""The longest answer; a longer span mostly is the start of one answer and the end of another."""

OUTSIDE_LABEL = "O"
"""The label of tokens outside of entities, in the IOB schemes; such tokens are not listed."""


class Activation(str, Enum):
    """How class scores come from logits."""

    SOFTMAX = "softmax"
    """Exactly one class applies."""
    SIGMOID = "sigmoid"
    """Each class applies or not, independently."""
    IDENTITY = "identity"
    """The logits are regression values."""


class Aggregation(str, Enum):
    """How tokens are grouped to entities; names as transformers' aggregation strategies."""

    NONE = "none"
    """Every token is an entity."""
    SIMPLE = "simple"
    """Adjacent tokens of one kind; ``B-`` begins a new entity."""
    FIRST = "first"
    """Adjacent words of one kind; a word has the label of its first token."""
    MAX = "max"
    """Adjacent words of one kind; a word has the label of its token with the highest score."""


@dataclass(frozen=True)
class Classification:
    """The best class of a text, and the score of every class in the order of the labels."""

    label: str
    score: float
    scores: dict[str, float]


@dataclass(frozen=True)
class Entity:
    """A token, or a group of them, with a label: characters ``start`` to ``end`` (exclusive) of the text."""

    start: int
    end: int
    text: str
    label: str
    score: float


@dataclass(frozen=True)
class Answer:
    """The best answer: characters ``start`` to ``end`` (exclusive) of the context; empty if there is no answer."""

    answer: str
    start: int
    end: int
    score: float


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
    scores = _ACTIVATIONS[activation](logits)
    best = int(np.argmax(logits))
    return Classification(
        label=labels[best],
        score=_number(scores[best]),
        scores={name: _number(score) for name, score in zip(labels, scores, strict=True)},
    )


def entities(
    logits: np.ndarray,
    labels: Sequence[str],
    *,
    text: str,
    encoding: Encoding,
    aggregation: Aggregation = Aggregation.NONE,
    continues: Sequence[bool] = (),
) -> list[Entity]:
    """The parts of a text that have a label other than `OUTSIDE_LABEL`, in order; special tokens have none.

    Equal to transformers' pipeline; the score of a group is the mean of its words' or tokens'.

    Args:
        logits: [tokens, labels], float32.
        labels: [labels], names; ``B-PER`` begins a PER, ``I-PER`` continues it.
        text: what was tokenised.
        encoding: its tokens.
        aggregation: how tokens are grouped.
        continues: [tokens], whether a token continues the previous word; used only to find words.
    """
    scores = softmax(logits)
    words: list[list[int]] = []
    by_word = aggregation in (Aggregation.FIRST, Aggregation.MAX)
    for token, sequence in enumerate(encoding.sequence_ids):
        if sequence is None:
            continue
        if by_word and words and continues[token]:
            words[-1].append(token)
        else:
            words.append([token])
    found: list[_Labelled] = []
    for word in words:
        decisive = max(word, key=lambda token: scores[token].max()) if aggregation is Aggregation.MAX else word[0]
        best = int(np.argmax(logits[decisive]))
        found.append(
            _Labelled(
                encoding.offsets[word[0]][0], encoding.offsets[word[-1]][1], labels[best], [scores[decisive, best]]
            )
        )
    if aggregation is not Aggregation.NONE:
        found = _groups(found)
    return [
        Entity(part.start, part.end, text[part.start : part.end], part.label, _number(np.mean(part.scores)))
        for part in found
        if part.label != OUTSIDE_LABEL
    ]


def continued_words(tokenizer: Any, encoding: Encoding, text: str) -> list[bool]:
    """[tokens], whether each continues the previous word, as in transformers' pipeline.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``. If it marks continuations (``##ing``), these count; otherwise a space
            before the token does.
        encoding: the text's tokens.
        text: what was tokenised.
    """
    model = tokenizer.model
    unknown = getattr(model, "unk_token", None)
    marks = bool(getattr(model, "continuing_subword_prefix", None))
    found = []
    for token_id, (start, end) in zip(encoding.input_ids, encoding.offsets, strict=True):
        token = tokenizer.id_to_token(token_id)
        spelt_otherwise = len(token) != end - start if marks else start > 0 and " " not in text[start - 1 : start + 1]
        found.append(spelt_otherwise and token != unknown)
    return found


def answer(start_logits: np.ndarray, end_logits: np.ndarray, *, context: str, encoding: Encoding) -> Answer:
    """The span of the context that most probably answers the question.

    It ends no earlier than it starts and has at most `MAX_ANSWER_TOKENS` tokens. Its score is the product of
    the probabilities of its first and last token among the context's tokens.

    Args:
        start_logits, end_logits: [tokens], float32, of question and context together.
        context: the second text of the pair.
        encoding: the tokens of the pair.

    Raises:
        InputError: the question has no token.
    """
    if 0 not in encoding.sequence_ids:
        raise InputError("The question has no tokens.")
    # Not by token types: RoBERTa models have none.
    inside = np.array([token for token, text in enumerate(encoding.sequence_ids) if text == 1], np.intp)
    if not len(inside):
        return Answer("", 0, 0, 0.0)
    start_scores, end_scores = softmax(start_logits[inside]), softmax(end_logits[inside])
    first, last = _best_span(start_logits[inside], end_logits[inside])
    start, end = encoding.offsets[inside[first]][0], encoding.offsets[inside[last]][1]
    return Answer(context[start:end], start, end, _number(start_scores[first] * end_scores[last]))


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
    return TextScore(total, perplexity, [_number(value) for value in log_probabilities])


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, in float32: no logit is too large, since the largest is subtracted first."""
    # A logit so far below the largest that the difference overflows has a share of zero, as it should.
    with np.errstate(over="ignore"):
        shifted = logits.astype(np.float32) - logits.max(axis=-1, keepdims=True).astype(np.float32)
    exponentials = np.exp(shifted)
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    # In terms of tanh nothing overflows, whatever the sign.
    return 0.5 * (1 + np.tanh(0.5 * logits.astype(np.float32)))


_ACTIVATIONS: dict[Activation, Callable[[np.ndarray], np.ndarray]] = {
    Activation.SOFTMAX: softmax,
    Activation.SIGMOID: _sigmoid,
    Activation.IDENTITY: lambda logits: logits,
}


@dataclass(frozen=True)
class _Labelled:
    start: int
    end: int
    label: str
    scores: list[np.float32]


def _groups(found: Sequence[_Labelled]) -> list[_Labelled]:
    """Neighbours of one kind as one; labels lose their ``B-`` and ``I-``."""
    groups: list[_Labelled] = []
    kind: str | None = None
    for part in found:
        begins, last_kind = part.label.startswith("B-"), kind
        kind = part.label[2:] if part.label.startswith(("B-", "I-")) else part.label
        if groups and kind == last_kind and not begins:
            groups[-1] = replace(groups[-1], end=part.end, scores=groups[-1].scores + part.scores)
        else:
            groups.append(replace(part, label=part.label.split("-", 1)[-1]))
    return groups


def _number(value: np.floating[Any]) -> float:
    """The float with the fewest digits that is this float32; 0.1 rather than 0.10000000149011612."""
    return float(str(np.float32(value)))


def _best_span(start_logits: np.ndarray, end_logits: np.ndarray) -> tuple[int, int]:
    """First and last index with the largest sum; of equal ones the shortest, then the earliest."""
    best, span = -np.inf, (0, 0)
    for extra in range(min(MAX_ANSWER_TOKENS, len(start_logits))):
        sums = start_logits[: len(start_logits) - extra] + end_logits[extra:]
        first = int(np.argmax(sums))
        if sums[first] > best:
            best, span = float(sums[first]), (first, first + extra)
    return span


def _best_tokens(scores: np.ndarray, spelling: Callable[[int], str]) -> list[Filling]:
    # A stable sort of the negated scores: of equally probable tokens the one with the smaller id comes first.
    best = np.argsort(-scores, kind="stable")[:FILL_MASK_CHOICES]
    return [Filling(spelling(int(token)), int(token), _number(scores[token])) for token in best]
