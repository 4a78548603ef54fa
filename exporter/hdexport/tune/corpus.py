"""The texts that positions are learnt from: tokenised, cut to chunks, with their sentences."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hdexport.support.texts import NamedText, read_texts
from hdruntime.errors import InputError, Setting
from hdruntime.text.sentences import sentence_spans

FEWEST_LONG = 8
"""Fewest texts longer than the checkpoint's positions; from fewer, their words are learnt, not positions."""

_FEWEST_CHARACTERS, _MOST_CHARACTERS = 40, 400
"""Length of a sentence that is taken out; shorter ones say too little, longer ones are tables or code."""

_LEAST_PROSE = 0.8
"""Share of letters, digits and blanks in a sentence; code and tables have more signs."""


class Document(NamedTuple):
    """A text, or a chunk of one; `tokens` counts special ones, and `sentences` are start and end of each in `text`."""

    name: str
    text: str
    tokens: int
    sentences: tuple[tuple[int, int], ...]

    def without(self, sentences: Sequence[tuple[int, int]]) -> str:
        """The text without some of its sentences, which are in order."""
        starts, ends = [0, *(end for _, end in sentences)], [*(start for start, _ in sentences), len(self.text)]
        return "".join(self.text[start:end] for start, end in zip(starts, ends, strict=True))

    def drawn_sentences(self, limit: int, random: np.random.Generator) -> list[tuple[int, int]]:
        """At most `limit` sentences, and at most half of them, in order."""
        number = min(limit, max(1, len(self.sentences) // 2))
        return [self.sentences[place] for place in np.sort(random.permutation(len(self.sentences))[:number])]


class Corpus(NamedTuple):
    """All texts.

    Attributes:
        long: documents of more tokens than the checkpoint has positions.
        short: other documents.
        texts: number of texts before they were split into chunks.
        digest: SHA-256 of names and texts.
    """

    long: tuple[Document, ...]
    short: tuple[Document, ...]
    texts: int
    digest: str


def read_corpus(source: Path, tokenizer: Any, *, column: str | None, base: int, max_tokens: int) -> Corpus:
    """Read the texts of a file or a folder, and split them into chunks of at most `max_tokens` tokens. `base` is the
    number of positions that the checkpoint was trained with. Raises an InputError for too few long texts."""
    long: list[Document] = []
    short: list[Document] = []
    digest, count = hashlib.sha256(), 0
    for text in read_texts(source, column=column):
        digest.update(f"{len(text.name)} {len(text.text)} {text.name}{text.text}".encode(errors="replace"))
        count += 1
        for chunk in _chunks(text, tokenizer, max_tokens):
            (long if chunk.tokens > base else short).append(chunk)
    if len(long) < FEWEST_LONG:
        raise InputError(
            f"{source} holds {count} texts, and {len(long)} of them or of their chunks have more than {base} tokens, "
            f"the checkpoint's positions; at least {FEWEST_LONG} are needed, and hundreds are better.",
            hint=(
                "Name more or longer texts with ",
                Setting("texts"),
                ". In a .txt file each line is a text; in a folder each .txt file is.",
            ),
        )
    return Corpus(long=tuple(long), short=tuple(short), texts=count, digest=digest.hexdigest())


def _chunks(text: NamedText, tokenizer: Any, max_tokens: int) -> Iterator[Document]:
    specials = tokenizer.num_special_tokens_to_add()
    tokens = tokenizer(text.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = tokens["offset_mapping"]
    size = max_tokens - specials
    for first in range(0, len(offsets), size):
        last = min(first + size, len(offsets)) - 1
        chunk = text.text[offsets[first][0] : offsets[last][1]]
        yield Document(text.name, chunk, last + 1 - first + specials, tuple(_sentences(chunk)))


def _sentences(text: str) -> Iterator[tuple[int, int]]:
    for start, end in sentence_spans(text):
        sentence = " ".join(text[start:end].split())
        prose = sum(character.isalnum() or character == " " for character in sentence)
        if _FEWEST_CHARACTERS <= len(sentence) <= _MOST_CHARACTERS and prose >= _LEAST_PROSE * len(sentence):
            yield start, end
