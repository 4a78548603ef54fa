"""Sentences of a text, by rules that need neither a model nor the text's language.

A sentence ends at a blank line and after its final punctuation: the full stops, question and exclamation marks of
Chinese, Japanese, Hindi, Arabic and others anywhere, ``.``, ``!``, ``?`` and an ellipsis if a space follows and then no
lower-case letter. Closing quotes and brackets belong to the sentence. A period after a single letter (``J. Smith``), a
title (``Dr. Smith``) or the number of a list item (``2. Install``) ends none. Other abbreviations before a capital
letter or a digit (``Fig. 3``, ``am 3. Oktober``) do. Scripts without such punctuation, as Thai, have only blank lines.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterator

_ENDS_ANYWHERE = (
    "\N{IDEOGRAPHIC FULL STOP}\N{HALFWIDTH IDEOGRAPHIC FULL STOP}"
    "\N{FULLWIDTH EXCLAMATION MARK}\N{FULLWIDTH QUESTION MARK}\N{ARABIC QUESTION MARK}\N{ARABIC FULL STOP}"
    "\N{DEVANAGARI DANDA}\N{DEVANAGARI DOUBLE DANDA}\N{ARMENIAN FULL STOP}"
    "\N{ETHIOPIC FULL STOP}\N{ETHIOPIC QUESTION MARK}\N{MYANMAR SIGN SECTION}\N{KHMER SIGN KHAN}"
)

_BORDER = re.compile(rf"(?P<punctuation>[.!?\N{{HORIZONTAL ELLIPSIS}}{_ENDS_ANYWHERE}]+)|\n[^\S\n]*\n")

_NO_END = re.compile(
    r"(?:^|[^\w'\N{RIGHT SINGLE QUOTATION MARK}])(?:[^\W\d_]|Mr|Mrs|Ms|Dr|Prof|St)$|(?:^|\n)\s*\d{1,3}$"
)
"""Characters before a single period that ends no sentence."""

_LONGEST_BEFORE = 6
"""Characters that `_NO_END` looks at."""

_CLOSING = ("Pe", "Pf")
"""Unicode categories of closing brackets and quotes; straight quotes have neither."""


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """(start, end) in characters of the sentences of a text, in order, without the white space around them, end
    exclusive.

    Every character but white space is in one of them.
    """
    spans = []
    for first, last in itertools.pairwise([0, *_ends(text), len(text)]):
        sentence = text[first:last]
        if stripped := sentence.strip():
            start = first + len(sentence) - len(sentence.lstrip())
            spans.append((start, start + len(stripped)))
    return spans


def _ends(text: str) -> Iterator[int]:
    for match in _BORDER.finditer(text):
        end = match.end()
        if match["punctuation"] is None:
            yield end
            continue
        while end < len(text) and (text[end] in "\"'" or unicodedata.category(text[end]) in _CLOSING):
            end += 1
        if any(mark in _ENDS_ANYWHERE for mark in match["punctuation"]) or _ends_before_space(text, match, end):
            yield end


def _ends_before_space(text: str, match: re.Match[str], end: int) -> bool:
    if end < len(text) and not text[end].isspace():
        return False
    before = text[max(0, match.start() - _LONGEST_BEFORE) : match.start()]
    return not (_next_letter(text, end).islower() or (match["punctuation"] == "." and _NO_END.search(before)))


def _next_letter(text: str, start: int) -> str:
    """The first character from there on that is no white space; empty at the end of the text."""
    while start < len(text) and text[start].isspace():
        start += 1
    return text[start : start + 1]
