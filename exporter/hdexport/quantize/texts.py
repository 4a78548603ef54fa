"""The texts that scales of activations are measured on."""

from __future__ import annotations

__all__ = ["CalibrationTexts", "calibration_texts"]

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hdexport.support.texts import read_texts
from hdexport.verify.sample_text import ENGLISH, RANDOM_IDS, english_texts, random_ids, sample_ids
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError
from hdruntime.text.tokenization import Overflow, TextTokenizer

_TEXTS = 64
_TOKENS = 512
_LONG_TOKENS = 2048

_SHORT_TEXTS = (2, 3, 4, 5, 6, 8, 11, 16, 23, 33, 47, 65)
"""Tokens of short texts, whose activations are unlike those of long ones: few tokens share all attention."""

_RARE_LENGTHS = (*(2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256) * 2, *(512,) * 8)
"""Tokens of texts of random ids. Texts of another kind have words that the calibration's lack, and without these, up to
all of the error of such a word was clipping."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class CalibrationTexts:
    """Texts in a model's tokens.

    Attributes:
        ids: [tokens], int64 each.
        source: the file's name, `ENGLISH` or `RANDOM_IDS`.
        rare: [tokens], int64 each, of ids drawn from the whole vocabulary.
    """

    ids: Sequence[IntArray]
    source: str
    rare: Sequence[IntArray]


def calibration_texts(bundle: Bundle, file: Path | None) -> CalibrationTexts:
    """Up to 64 texts of up to 512 tokens, short ones, and a long one where the model takes longer texts.

    Args:
        bundle: whose tokenizer is used.
        file: of texts; None for English texts that ship with Python, or random ids where there is no tokenizer for
            them.

    Raises:
        InputError: the file cannot be read, holds no text, or the bundle has no tokenizer.
    """
    longest = bundle.manifest.max_len
    lengths = [min(_TOKENS, longest)] * _TEXTS
    if longest > _TOKENS:
        lengths.append(min(_LONG_TOKENS, longest))
    if file is None:
        ids, kind = sample_ids(bundle, lengths[-1:])
        if kind == RANDOM_IDS:
            return CalibrationTexts(ids=sample_ids(bundle, lengths)[0], source=RANDOM_IDS, rare=())
        english = _with_short(_encoded(bundle, english_texts()[:_TEXTS]))
        return CalibrationTexts(ids=english + ids, source=ENGLISH, rare=_rare(bundle))
    if bundle.manifest.tokenizer is None:
        raise InputError(
            f"--calibrate names {file}, but the checkpoint has no tokenizer to read texts with.\n"
            "Add its tokenizer.json, or leave --calibrate out: random ids are used then."
        )
    texts = [text.text for text in itertools.islice(read_texts(file, option="--calibrate"), _TEXTS)]
    ids = _with_short(_encoded(bundle, texts))
    if longest > _TOKENS:
        ids += _encoded(bundle, ["\n".join(texts)], tokens=lengths[-1])
    return CalibrationTexts(ids=ids, source=file.name, rare=_rare(bundle))


def _rare(bundle: Bundle) -> list[IntArray]:
    lengths = [min(length, bundle.manifest.max_len) for length in _RARE_LENGTHS]
    return random_ids(bundle.manifest, lengths)


def _with_short(texts: list[IntArray]) -> list[IntArray]:
    """The texts, and two short ones of each size, which end as the whole does."""
    short = []
    for number, length in enumerate((*_SHORT_TEXTS, *_SHORT_TEXTS)):
        text = texts[number % len(texts)]
        if len(text) > length:
            short.append(np.concatenate([text[: length - 1], text[-1:]]))
    return [*texts, *short]


def _encoded(bundle: Bundle, texts: Sequence[str], tokens: int = _TOKENS) -> list[IntArray]:
    tokenizer = bundle.manifest.tokenizer
    assert tokenizer is not None
    encoder = TextTokenizer(bundle.file(tokenizer.file), max_len=min(tokens, bundle.manifest.max_len))
    return [np.array(each.input_ids, np.int64) for each in encoder.encode(texts, overflow=Overflow.TRUNCATE)]
