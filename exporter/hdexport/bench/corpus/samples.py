"""The texts of a corpus: a file of the user's, or a sample of Python's own help, which is on every machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

from hdexport.support.texts import read_texts


def _short(draw: random.Random) -> list[int]:
    return [draw.randint(4, 20) for _ in range(3000)]


def _mixed(draw: random.Random) -> list[int]:
    return [min(1200, max(8, round(draw.lognormvariate(4.8, 1.1)))) for _ in range(200)]


def _long(draw: random.Random) -> list[int]:
    # A word of this text has 1.9 tokens of BERT's vocabulary: 1,000 to 8,000 tokens.
    return [draw.randint(530, 4200) for _ in range(16)]


SAMPLES: dict[str, tuple[str, Callable[[random.Random], list[int]]]] = {
    "short": ("3,000 texts of 4 to 20 words", _short),
    "mixed": ("200 texts of 8 to 1,200 words, log-normal", _mixed),
    "long": ("16 texts of 530 to 4,200 words", _long),
}
"""Name -> description, and the words of each text."""


def texts_of(corpus: str) -> list[str]:
    """The texts of a sample, the same ones each time, or of a file.

    Args:
        corpus: a name of `SAMPLES`, else a file or folder as `read_texts` reads it.

    Raises:
        InputError: no text is there.
    """
    if corpus not in SAMPLES:
        return [text.text for text in read_texts(Path(corpus), option="--corpus")]
    draw, words = random.Random(0), " ".join(topics.values()).split()
    lengths = SAMPLES[corpus][1](draw)
    starts = [draw.randrange(len(words) - length) for length in lengths]
    return [" ".join(words[start : start + length]) for start, length in zip(starts, lengths, strict=True)]
