"""The part of a long text that has its first or last tokens, so that the rest is not tokenized."""

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
"""Characters per token in the first attempt."""

_LOOK_AHEAD = 1024
"""Characters beyond a boundary that are tokenized, too: more than a tokenizer looks ahead."""

_WORTHWHILE = 4
"""A shorter text than this multiple of its part is tokenized in full, because the part is tokenized twice. Pairs are an
exception: the number of overflowing encodings that tokenizers makes of a pair is the product of its texts' numbers."""

_BOUNDARY = re.compile(r"(?<=\S)[ \n](?=[^\W_])")
"""One space between any character and a letter or digit: no composition and no run of spaces, digits or punctuation
crosses it."""

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
"""Steps of a ``tokenizer.json`` whose result at a position depends on its surroundings only; FixedLength is missing
because it counts from the start."""

_PATTERN_PARTS = re.compile(r"\(\?!\\S\)|\\.|\[(?:\\.|[^\]\\])*\]|\(\?[=!<]|.", re.DOTALL)


class PartialTexts:
    """Finds the part of a text that must be tokenized for its first or last tokens.

    Args:
        tokenizer: ``tokenizers.Tokenizer`` without truncation and padding.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def of(
        self, text: str, *, tokens: int, side: Side, in_pair: bool = False, max_characters: int | None = None
    ) -> str:
        """A part of a text with the text's first or last tokens; the full text if no part is known to have them.

        Args:
            text: the text.
            tokens: number of tokens.
            side: the side whose tokens are left out.
            in_pair: whether the text belongs to a pair.
            max_characters: maximum characters that are tokenized together, or None.
        """
        size = _CHARACTERS_PER_TOKEN * tokens + 2 * _LOOK_AHEAD
        is_large = max_characters is not None and len(text) > max_characters
        times = 1 if is_large or in_pair else _WORTHWHILE
        while size * times < len(text) and self._is_local:
            part = text[:size] if side == "right" else text[-size:]
            settled = self._settled(part, side)
            if settled >= tokens:
                return part
            if is_large and size == max_characters:
                break
            size *= max(2, min(4, tokens // max(1, settled) + 1))
            size = size if max_characters is None else min(size, max(max_characters, len(part)))
        return text

    def _settled(self, part: str, side: Side) -> int:
        """Number of tokens of a part that do not depend on the text beyond its open side."""
        encoding = self._tokenizer.encode(part, add_special_tokens=False)
        offsets, words = encoding.offsets, encoding.word_ids
        for position in _boundaries(part, side):
            # The first token that ends beyond the boundary starts at it, unless the boundary is inside the token.
            token = bisect.bisect_right(offsets, position, key=operator.itemgetter(1))
            if not 0 < token < len(offsets) or offsets[token][0] < position:
                continue
            if words[token - 1] != words[token] or self._divides(part[position], side):
                return token if side == "right" else len(offsets) - token
        return 0

    def _divides(self, space: str, side: Side) -> bool:
        """Whether the two sides of a space are independent inside one pre-token."""
        model = self._steps["model"]["type"]
        # Unigram adds the scores of a pre-token from its start, and their rounding may decide between equal ones.
        if not (model == "BPE" or (model == "Unigram" and side == "right")):
            return False
        is_bytes = '"ByteLevel"' in self._serialized
        written = {" ": " Ġ", "\n": " \nĠĊ"} if is_bytes else {" ": " ▁", "\n": " \n▁"}
        joins = re.compile(f"[^{written[space]}][{written[space]}]")
        return not any(map(joins.search, self._vocabulary))

    @functools.cached_property
    def _serialized(self) -> str:
        return str(self._tokenizer.to_str())

    @functools.cached_property
    def _steps(self) -> dict[str, Any]:
        steps: dict[str, Any] = json.loads(self._serialized)
        # Without the vocabulary, whose entries may be a quarter of a million.
        steps["model"] = {"type": steps["model"]["type"]}
        return steps

    @functools.cached_property
    def _vocabulary(self) -> list[str]:
        return list(self._tokenizer.get_vocab(with_added_tokens=False))

    @functools.cached_property
    def _is_local(self) -> bool:
        """Whether every token depends on its surroundings only."""
        return all(_is_local(self._steps.get(name), known) for name, known in _LOCAL.items())


def _boundaries(part: str, side: Side) -> Iterable[int]:
    """Positions of boundaries in a part, starting at the side that is left out."""
    if side == "left":
        return (match.start() for match in _BOUNDARY.finditer(part, _LOOK_AHEAD))
    return reversed([match.start() for match in _BOUNDARY.finditer(part, 0, max(0, len(part) - _LOOK_AHEAD))])


def _is_local(step: dict[str, Any] | None, known: set[str]) -> bool:
    if step is None:
        return True
    pattern = step.get("pattern")
    sees_far = isinstance(pattern, dict) and _sees_far(pattern.get("Regex", ""))
    steps = [*step.get("normalizers", ()), *step.get("pretokenizers", ())]
    return step["type"] in known and not sees_far and all(_is_local(each, known) for each in steps)


def _sees_far(pattern: str) -> bool:
    """Whether a regular expression may match across a boundary; True if unknown."""
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
