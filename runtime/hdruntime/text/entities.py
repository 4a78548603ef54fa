"""Entities: the parts of a text whose tokens have a label, in the text's characters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from hdruntime.text.encoding import Encoding
from hdruntime.text.logits import shortest, softmax

OUTSIDE_LABEL = "O"
"""The label of tokens outside of entities, in the IOB schemes; such tokens are not listed."""


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
    AVERAGE = "average"
    """Adjacent words of one kind; a word has the label with the highest mean score of its tokens."""


@dataclass(frozen=True)
class Entity:
    """A token, or a group of them, with a label: characters ``start`` to ``end`` (exclusive) of the text."""

    start: int
    end: int
    text: str
    label: str
    score: float


def entities(
    logits: np.ndarray,
    labels: Sequence[str],
    *,
    text: str,
    encoding: Encoding,
    aggregation: Aggregation,
    tokenizer: Any,
) -> list[Entity]:
    """The parts of a text that have a label other than `OUTSIDE_LABEL`, in order; special tokens have none.

    Equal to transformers' pipeline; the score of a group is the mean of its words' or tokens'.

    Args:
        logits: [tokens, labels], float32.
        labels: [labels], names; ``B-PER`` begins a PER, ``I-PER`` continues it.
        text, encoding: the text and its tokens.
        aggregation: how tokens are grouped.
        tokenizer: a ``tokenizers.Tokenizer``, which tells words apart.
    """
    scores = softmax(logits)
    words: list[list[int]] = []
    by_word = aggregation not in (Aggregation.NONE, Aggregation.SIMPLE)
    continues = _continued_words(tokenizer, encoding, text) if by_word else []
    for token, sequence in enumerate(encoding.sequence_ids):
        if sequence is None:
            continue
        if by_word and words and continues[token]:
            words[-1].append(token)
        else:
            words.append([token])
    found: list[_Labelled] = []
    for word in words:
        of_word = _scores_of_word(scores[word], aggregation)
        best = int(np.argmax(of_word))
        start, end = encoding.offsets[word[0]][0], encoding.offsets[word[-1]][1]
        found.append(_Labelled(start, end, labels[best], [of_word[best]]))
    if aggregation is not Aggregation.NONE:
        found = _groups(found)
    return [
        Entity(part.start, part.end, text[part.start : part.end], part.label, shortest(np.mean(part.scores)))
        for part in found
        if part.label != OUTSIDE_LABEL
    ]


def _continued_words(tokenizer: Any, encoding: Encoding, text: str) -> list[bool]:
    """[tokens], whether each continues the previous word, as in transformers' pipeline: where the tokenizer marks
    continuations (``##ing``) these count, otherwise a space before the token does."""
    unknown = _unknown_token(tokenizer.model)
    marks = bool(getattr(tokenizer.model, "continuing_subword_prefix", None))
    found = []
    for token_id, (start, end) in zip(encoding.input_ids, encoding.offsets, strict=True):
        token = tokenizer.id_to_token(token_id)
        spelt_otherwise = len(token) != end - start if marks else start > 0 and " " not in text[start - 1 : start + 1]
        found.append(spelt_otherwise and token_id != unknown)
    return found


def _unknown_token(model: Any) -> int | None:
    """The id of a tokenizer's unknown token, found by a character that no vocabulary has; None without one."""
    try:
        tokens = model.tokenize("\U0010ffff")  # never a character
    except Exception:  # of a model without such a token; tokenizers raises nothing more specific
        return None
    return tokens[0].id if len(tokens) == 1 else None


def _scores_of_word(scores: np.ndarray, aggregation: Aggregation) -> np.ndarray:
    """[labels], from its tokens' scores, [tokens, labels]."""
    if aggregation is Aggregation.AVERAGE:
        return np.asarray(scores.mean(axis=0))
    return np.asarray(scores[scores.max(axis=1).argmax() if aggregation is Aggregation.MAX else 0])


class _Labelled(NamedTuple):
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
            groups[-1] = groups[-1]._replace(end=part.end, scores=groups[-1].scores + part.scores)
        else:
            groups.append(part._replace(label=part.label.split("-", 1)[-1]))
    return groups
