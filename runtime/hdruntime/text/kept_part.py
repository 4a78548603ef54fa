"""The beginning or end of a long text that holds the tokens that are kept, so that the rest is not tokenized."""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import operator
import re
from collections.abc import Iterable
from typing import Any

from hdruntime.bundle.manifest import Side

_CHARACTERS_PER_TOKEN = 8
"""Characters that are read for each token that is wanted, at first."""

_SEEN_BEYOND = 1024
"""Characters beyond a boundary that the tokenizer reads, too: more than it looks ahead from there."""

_WORTHWHILE = 4
"""A text that is less than so many times as long as its part is read whole: the part is tokenized twice. Texts of pairs
are not: the library makes as many pieces of a pair as the two texts' numbers of pieces multiplied."""

_BOUNDARY = re.compile(r"(?<=\S)[ \n](?=[^\W_])")
"""One space between any character and a letter or digit: nothing composes across it, and no run passes it, be it of
spaces, digits or marks."""

_LOCAL = {
    "normalizer": {
        *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend"),
        *("Replace", "Sequence", "Strip", "StripAccents"),
    },
    "pre_tokenizer": {
        *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation", "Sequence"),
        *("Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"),
    },
    "model": {"BPE", "Unigram", "WordLevel", "WordPiece"},
}
"""The steps of a ``tokenizer.json`` that treat a place by its surroundings alone; FixedLength counts from the start."""

_PATTERN_PARTS = re.compile(r"\(\?!\\S\)|\\.|\[(?:\\.|[^\]\\])*\]|\(\?[=!<]|.", re.DOTALL)


class KeptParts:
    """Finds how much of a text must be read for its first tokens, or its last ones, by a ``tokenizers.Tokenizer`` that
    neither cuts nor pads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def of(self, text: str, *, tokens: int, side: Side, in_pair: bool = False, most: int | None = None) -> str:
        """A part of a text whose first `tokens`, or last ones, are the text's; the whole text where none is known.

        `side` is the one whose tokens are left out, and `most` limits the characters that are read at once; None: any
        number.
        """
        size = _CHARACTERS_PER_TOKEN * tokens + 2 * _SEEN_BEYOND
        is_large = most is not None and len(text) > most
        times = 1 if is_large or in_pair else _WORTHWHILE
        while size * times < len(text) and self._is_local:
            part = text[:size] if side == "right" else text[-size:]
            settled = self._settled(part, side)
            if settled >= tokens:
                return part
            if is_large and size == most:
                break
            size *= max(2, min(4, tokens // max(1, settled) + 1))
            size = size if most is None else min(size, max(most, len(part)))
        return text

    def _settled(self, part: str, side: Side) -> int:
        """How many tokens of a part stay the same, whatever text follows on its open side."""
        encoding = self._tokenizer.encode(part, add_special_tokens=False)
        offsets, words = encoding.offsets, encoding.word_ids
        for place in _boundaries(part, side):
            # The first token that ends beyond the boundary begins there, unless the boundary is inside of it.
            token = bisect.bisect_right(offsets, place, key=operator.itemgetter(1))
            if not 0 < token < len(offsets) or offsets[token][0] < place:
                continue
            if words[token - 1] != words[token] or self._divides(part[place], side):
                return token if side == "right" else len(offsets) - token
        return 0

    def _divides(self, space: str, side: Side) -> bool:
        """Whether the two sides of a space are independent inside of what the model reads as one word."""
        kind = self._parts["model"]["type"]
        # Unigram adds the scores of a word from its start, and their rounding may decide between equal ones.
        if not (kind == "BPE" or (kind == "Unigram" and side == "right")):
            return False
        is_bytes = '"ByteLevel"' in self._serialized
        written = {" ": " Ġ", "\n": " \nĠĊ"} if is_bytes else {" ": " ▁", "\n": " \n▁"}
        joins = re.compile(f"[^{written[space]}][{written[space]}]")
        return not any(map(joins.search, self._vocabulary))

    @functools.cached_property
    def _serialized(self) -> str:
        return str(self._tokenizer.to_str())

    @functools.cached_property
    def _parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = json.loads(self._serialized)
        # Without the vocabulary: a quarter of a million entries, of which none is read.
        parts["model"] = {"type": parts["model"]["type"]}
        return parts

    @functools.cached_property
    def _vocabulary(self) -> list[str]:
        return list(self._tokenizer.get_vocab(with_added_tokens=False))

    @functools.cached_property
    def _is_local(self) -> bool:
        """Whether every token depends on its surroundings alone."""
        return all(_is_local(self._parts.get(name), known) for name, known in _LOCAL.items())


def _boundaries(part: str, side: Side) -> Iterable[int]:
    """Places in a part where a text may be cut, beginning at the side that is left out."""
    if side == "left":
        return (found.start() for found in _BOUNDARY.finditer(part, _SEEN_BEYOND))
    return reversed([found.start() for found in _BOUNDARY.finditer(part, 0, max(0, len(part) - _SEEN_BEYOND))])


def _is_local(step: dict[str, Any] | None, known: set[str]) -> bool:
    if step is None:
        return True
    pattern = step.get("pattern")
    sees_far = isinstance(pattern, dict) and _sees_far(pattern.get("Regex", ""))
    steps = [*step.get("normalizers", ()), *step.get("pretokenizers", ())]
    return step["type"] in known and not sees_far and all(_is_local(each, known) for each in steps)


def _sees_far(pattern: str) -> bool:
    """Whether a regular expression may look past a boundary, judged by what it is made of: in doubt it may."""
    parts = _PATTERN_PARTS.findall(pattern)
    for part, after in itertools.zip_longest(parts, parts[1:], fillvalue=""):
        has_no_end = after in ("*", "+", "{")
        if part in (".", "^", "$", "(?=", "(?!", "(?<", r"\A", r"\G", r"\K", r"\R", r"\X", r"\Z", r"\z"):
            return True
        if has_no_end and (part in (r"\D", r"\P", r"\W") or (part.startswith("[^") and r"\s" not in part)):
            return True
        if part.startswith("[") and re.search(r"\\[DPSW]", part):
            return True
    return False
