"""Entities of a text, from the labels of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from hdruntime.text.encoding import Encoding
from hdruntime.text.logits import shortest, softmax

OUTSIDE_LABEL = "O"
"""The label of tokens outside of entities, in the IOB schemes; such tokens are not listed."""


class Aggregation(StrEnum):
    """Grouping of tokens into entities: transformers' aggregation strategies."""

    NONE = "none"
    """Every token is an entity."""
    SIMPLE = "simple"
    """Adjacent tokens of one entity type; ``B-`` starts a new entity."""
    FIRST = "first"
    """Adjacent words of one entity type; a word has the label of its first token."""
    MAX = "max"
    """Adjacent words of one entity type; a word has the label of its token with the highest score."""
    AVERAGE = "average"
    """Adjacent words of one entity type; a word has the label with the highest mean score of its tokens."""


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
        tokenizer: ``tokenizers.Tokenizer`` that separates words.
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
    spans: list[_LabeledSpan] = []
    for word in words:
        word_scores = _scores_of_word(scores[word], aggregation)
        best = int(np.argmax(word_scores))
        start, end = encoding.offsets[word[0]][0], encoding.offsets[word[-1]][1]
        spans.append(_LabeledSpan(start, end, labels[best], [word_scores[best]]))
    if aggregation is not Aggregation.NONE:
        spans = _grouped(spans)
    return [
        Entity(span.start, span.end, text[span.start : span.end], span.label, shortest(np.mean(span.scores)))
        for span in spans
        if span.label != OUTSIDE_LABEL
    ]


def _continued_words(tokenizer: Any, encoding: Encoding, text: str) -> list[bool]:
    """[tokens], whether each token continues the previous word, as in transformers' pipeline.

    A token continues a word if it has the prefix of subwords (``##ing``), or, without such a prefix in the tokenizer,
    if no space precedes it.
    """
    unknown = _unknown_token(tokenizer.model)
    has_subword_prefix = bool(getattr(tokenizer.model, "continuing_subword_prefix", None))
    continues = []
    for token_id, (start, end) in zip(encoding.input_ids, encoding.offsets, strict=True):
        token = tokenizer.id_to_token(token_id)
        if has_subword_prefix:
            is_subword = len(token) != end - start
        else:
            is_subword = start > 0 and " " not in text[start - 1 : start + 1]
        continues.append(is_subword and token_id != unknown)
    return continues


def _unknown_token(model: Any) -> int | None:
    """The id of the unknown token, from a character outside of every vocabulary; None without such a token."""
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


class _LabeledSpan(NamedTuple):
    start: int
    end: int
    label: str
    scores: list[np.float32]


def _grouped(spans: Sequence[_LabeledSpan]) -> list[_LabeledSpan]:
    """Merge adjacent spans of one entity type; labels lose the prefixes ``B-`` and ``I-``."""
    groups: list[_LabeledSpan] = []
    entity_type: str | None = None
    for span in spans:
        is_first, previous_type = span.label.startswith("B-"), entity_type
        entity_type = span.label[2:] if span.label.startswith(("B-", "I-")) else span.label
        if groups and entity_type == previous_type and not is_first:
            groups[-1] = groups[-1]._replace(end=span.end, scores=groups[-1].scores + span.scores)
        else:
            groups.append(span._replace(label=span.label.split("-", 1)[-1]))
    return groups
