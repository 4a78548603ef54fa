"""Long documents of two kinds: topics of Python's help, and pages of Debian's documentation."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from benchmarks.quality.debian import held_out_pages
from hdexport.quality.queries import prose_sentences

_LEAST_TOKENS, _MOST_TOKENS = 768, 1792
"""Tokens of a page: one and a half times to three and a half times the sample model's length in training."""

_FEWEST_SENTENCES = 8
_PAGES, _PAGES_OF_PACKAGE = 300, 50


@dataclass(frozen=True)
class Corpus:
    """Documents, all of which are long.

    Attributes:
        texts: name -> text.
        versions: of the texts' sources.
    """

    texts: dict[str, str]
    versions: dict[str, str]


def python_topics(cache: Path, lengths_of: Callable[[list[str]], list[int]], *, trained: int) -> Corpus:
    """The topics of more than `trained` tokens."""
    lengths = lengths_of(list(topics.values()))
    long = [name for (name, _), length in zip(topics.items(), lengths, strict=True) if length > trained]
    return Corpus({name.replace("-", " "): topics[name] for name in long}, {"python": platform.python_version()})


def debian_pages(cache: Path, lengths_of: Callable[[list[str]], list[int]], *, trained: int) -> Corpus:
    """Pages of prose of 768 to 1792 tokens, drawn by a hash of their names, at most 50 of a package."""
    pages, versions = held_out_pages(cache)
    lengths = lengths_of([page.text for page in pages])
    drawn: dict[str, str] = {}
    of_package: Counter[str] = Counter()
    for page, length in sorted(zip(pages, lengths, strict=True), key=lambda item: _hash(item[0].name)):
        package = page.name.partition("/")[0]
        if (
            _LEAST_TOKENS <= length <= _MOST_TOKENS
            and of_package[package] < _PAGES_OF_PACKAGE
            and len(drawn) < _PAGES
            and page.title not in drawn
            and len(list(prose_sentences(page.text))) >= _FEWEST_SENTENCES
        ):
            drawn[page.title] = page.text
            of_package[package] += 1
    return Corpus(drawn, versions)


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


CORPORA: Mapping[str, Callable[..., Corpus]] = {"python": python_topics, "debian": debian_pages}
"""Name -> (cache folder, texts -> tokens of each, trained positions) -> documents."""
