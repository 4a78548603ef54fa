"""Queries without labels: sentences taken out of texts must find the texts that they came from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

KINDS = ("name", "first", "later")
"""Kinds of queries: a text's name, its first sentence, and sentences that a model of trained positions never reads."""

_PARAGRAPH = re.compile(r"(?:[^\n]*\S[^\n]*(?:\n|\Z))+")
_END = r"[.:!?](?=\s|\Z)|[\u3002\uff01\uff1f]"
_SENTENCE = re.compile(rf'(?<![^\s\u3002\uff01\uff1f])["*(]*([^\W\d_]).*?(?:{_END})', re.DOTALL)
"""A sentence: from a letter to the next full stop or colon; Chinese and Japanese have no space after theirs."""

_WORD = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]|[^\s\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]+")
"""A character, in scripts that do not separate words by spaces."""

_FEWEST_WORDS, _MOST_WORDS = 8, 60
_NOT_PROSE = (">>>", "::=", "===", "***", "---", "```")


@dataclass(frozen=True)
class Queries:
    """Queries of one kind, and of each the index of its document."""

    texts: list[str] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)


class Collection(NamedTuple):
    """Documents without the sentences that ask for them, and kind -> queries, in the order of `KINDS`."""

    documents: list[str]
    queries: dict[str, Queries]


def collection_of(
    texts: Sequence[str], *, unread: Sequence[int | None], names: Sequence[str | None], sentences: int
) -> Collection:
    """Takes sentences out of the long texts, at most `sentences` later ones of each, spread evenly.

    Sentences that occur more than once are no queries, because some texts contain others. Where later sentences are
    few, every second one stays, so that the text still has a later part.

    Args:
        unread: [texts], the first character that a model with its trained positions does not read; None for a text that
            it reads whole, which is not asked for.
        names: [texts]; None for a text without one. Names that occur more than once are no queries.
    """
    collection = Collection([], {kind: Queries() for kind in KINDS})
    spans = [list(prose_sentences(text)) for text in texts]
    times = Counter(_flat(text[slice(*span)]) for text, prose in zip(texts, spans, strict=True) for span in prose)
    names_times = Counter(name.lower() for name in names if name)
    for index, (text, prose, boundary, name) in enumerate(zip(texts, spans, unread, names, strict=True)):
        if boundary is None:
            collection.documents.append(text)
            continue
        alone = [span for span in prose if times[_flat(text[slice(*span)])] == 1]
        later = _spread([span for span in alone if span[0] >= boundary], sentences)
        first = [span for span in alone[:1] if span[0] < boundary]
        queries_of_kind = {
            "name": [name] if name and names_times[name.lower()] == 1 else [],
            "first": [_flat(text[slice(*span)]) for span in first],
            "later": [_flat(text[slice(*span)]) for span in later],
        }
        for kind, queries in queries_of_kind.items():
            collection.queries[kind].texts.extend(queries)
            collection.queries[kind].answers.extend([index] * len(queries))
        collection.documents.append(_without(text, [*first, *later]))
    return collection


def unread_from(offsets: Sequence[Sequence[tuple[int, int]]], trained: int) -> list[int | None]:
    """Where each text continues after the trained positions of a model; None for a text that ends before. `offsets`
    are, of each text, [tokens, 2], start and end in characters, special tokens included."""
    return [of_text[trained - 1][0] if len(of_text) > trained else None for of_text in offsets]


def prose_sentences(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each sentence of prose; headings, code and grammars are not prose."""
    for paragraph in _PARAGRAPH.finditer(text):
        if not any(mark in paragraph[0] for mark in _NOT_PROSE):
            for match in _SENTENCE.finditer(paragraph[0]):
                is_capitalized = match[1] == match[1].upper()  # scripts without capitals included
                if is_capitalized and _FEWEST_WORDS <= len(_WORD.findall(match[0])) <= _MOST_WORDS:
                    yield paragraph.start() + match.start(), paragraph.start() + match.end()


def _spread(spans: list[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    number = min(limit, (len(spans) + 1) // 2)
    return [spans[place * (len(spans) - 1) // max(number - 1, 1)] for place in range(number)]


def _without(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """A text without some of its parts, which are in order and do not overlap."""
    starts, ends = [0, *(end for _, end in spans)], [*(start for start, _ in spans), len(text)]
    return "".join(text[start:end] for start, end in zip(starts, ends, strict=True))


def _flat(text: str) -> str:
    return " ".join(text.split())
