"""Comparison of the token ids of a tokenizer's graph with the tokenizer's, on texts of many kinds."""

from __future__ import annotations

import random
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

Ids = Callable[[Sequence[str]], list[list[int]]]
"""Token ids of each text of a batch, with special tokens."""

_BATCH = 1000

_PLAIN = (
    *("", "a", "the river", "The river flows through Berlin, who wrote it?", "don't we'll I'M (1815) e-mail@x.org"),
    *("3.14159", "1234567890123", "1,234.5 $9.99 50%", "a/b\\c_d-e+f=g", "#tag @user `code` ~x~ ^y^ {z} [w] <v>"),
    *("I\u2019m \u201cquoted\u201d\u2014dash\u2026", "NASA's O'Neill", "<|endoftext|>", "a<|endoftext|>b x"),
)
COMPARED: Mapping[str, tuple[str, ...]] = {
    "plain": _PLAIN,
    "accents": (
        *("na\u00efve caf\u00e9", "\u00c0\u00c9\u00d5", "\u00c5ngstr\u00f6m", "\u017b\u00f3\u0142w \u0105\u0119"),
        *("\u1ebf \u1ec7 \u01b0\u01a1", "\u00f1\u00e7\u00fc\u00e5\u00f8 \u00d7 \u00f7"),
    ),
    "capitals": (
        *(
            "\u0391\u03a3 \u03a3\u0391\u03a3",
            "\u0130stanbul \u0131",
            "Stra\u00dfe STRASSE \u1e9e",
            "\u0416\u0411\u0419",
        ),
        *("\u01c5 \u01c4", "\uff21\uff22\uff23 \U0001d400"),
    ),
    "compatibility-forms": (
        "\ufb01ne \ufb03",
        "\u00bd \u00b2 \u2122 \u2460",
        "\uff46\uff55\uff4c\uff4c",
        "\u2163 \u337f",
    ),
    "languages": (
        *("\u6f22\u5b57\u304b\u306a\u4ea4\u3058\u308a\u6587\u3002", "\u4e2d\u6587\u5b57 mixed \u4e2d\u6587"),
        *("\ud55c\uad6d\uc5b4 \uae00", "\u0e44\u0e17\u0e22\u0e01\u0e33", "\u0939\u093f\u0928\u094d\u0926\u0940"),
        *("\u0627\u0644\u0643\u062a\u0627\u0628 \u0643\u062a\u0627\u0628\u064b", "\u05e2\u05d1\u05e8\u05d9\u05ea"),
        *(
            "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0451\u0439",
            "\u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac",
        ),
    ),
    "emoji": ("\U0001f600 ok", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\u2764\ufe0f x"),
    "control-characters": (
        *("\ufeffbom", "a\u00adb", "\u200b zero \u200c\u200d", "\x01a\x02b\x03c\x7f", "a\x85b \u2028 \u2029c"),
        *("\ufffd \u2060", "tab\tline\nfeed\r\nreturn\rx\x0by\x0cz"),
    ),
    "white-space": (
        *(" ", "  ", "\n", " a ", "  spaced   out  ", "a\n\nb", "a \n b", "a  \n  b\n", "\u00a0a\u3000b\u2003c\u00a0"),
        *(" \t \n", "a    b     c\n\n\n d", "\n\n a", "x \n", "x\n "),
    ),
    "long-words": tuple(letter * size for letter in ("x", "\u00e9") for size in (99, 100, 101, 300)),
    "repeated-characters": tuple(
        f"{before}{letter * size}"
        for letter in "-=*.~_a0!\u2026"
        for size in (2, 3, 5, 8, 40)
        for before in ("", "\u0e53 ")
    ),
    "decomposed": (
        *(
            "e\u0301",
            "cafe\u0301 nai\u0308ve",
            "e\u0301\u0302",
            "e\u0302\u0301",
            "A\u030angstro\u0308m",
            "a\u0323\u0302",
        ),
        *("\u1112\u1161\u11ab\u1100\u116e\u11a8", "\u0131\u0307", "\u00e9\u0301 \ufb01\u0301 x\u0301", "\u304b\u3099"),
    ),
}
"""Kind of text -> texts without special tokens."""

_MIXED = tuple(
    text
    for kind in COMPARED
    if kind not in ("decomposed", "repeated-characters", "long-words")
    for text in COMPARED[kind]
)

KINDS = (*COMPARED, "special-tokens", "mixtures", "characters", "vocabulary", "lengths")
"""Kinds of texts that are compared."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A text whose ids differ.

    Attributes:
        kind: one of `KINDS`.
        text: the shortest text of the kind that differs.
        actual: tokens of the graph.
        expected: tokens of the tokenizer.
        texts: number of texts of the kind that differ.
        compared: number of texts of the kind.
    """

    kind: str
    text: str
    actual: tuple[str, ...]
    expected: tuple[str, ...]
    texts: int
    compared: int


def differences(graph_ids: Ids, truncated_ids: Ids, tokenizer: Tokenizer, *, max_tokens: int) -> list[Difference]:
    """Compare texts of all kinds.

    Args:
        graph_ids: ids of the graph, which truncates none of these texts.
        truncated_ids: ids of the graph that truncates to `max_tokens`.
        tokenizer: tokenizer that truncates to `max_tokens` and does not pad.
        max_tokens: maximum tokens of a text.
    """
    whole = type(tokenizer).from_str(tokenizer.to_str())
    whole.no_truncation()
    differing = []
    for kind, texts in _compared_texts(whole, max_tokens):
        is_cut = kind == "lengths"
        difference = _difference(kind, texts, truncated_ids if is_cut else graph_ids, tokenizer if is_cut else whole)
        if difference is not None:
            differing.append(difference)
    return differing


def _difference(kind: str, texts: Sequence[str], ids: Ids, tokenizer: Tokenizer) -> Difference | None:
    wrong = []
    size = 1 if kind == "lengths" else _BATCH
    for start in range(0, len(texts), size):
        batch = texts[start : start + size]
        encodings = tokenizer.encode_batch(batch)
        for text, actual, encoding in zip(batch, ids(batch), encodings, strict=True):
            if actual != encoding.ids:
                wrong.append((text, actual, encoding.ids))
    if not wrong:
        return None
    text, actual, expected = min(wrong, key=lambda each: len(each[0]))
    return Difference(
        kind=kind,
        text=text,
        actual=_tokens(tokenizer, actual),
        expected=_tokens(tokenizer, expected),
        texts=len(wrong),
        compared=len(texts),
    )


def _tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, ...]:
    return tuple(tokenizer.id_to_token(each) or f"id {each}" for each in ids)


def _compared_texts(tokenizer: Tokenizer, max_tokens: int) -> Iterator[tuple[str, Sequence[str]]]:
    special = _special_texts(tokenizer)
    characters, combining = _characters()
    for kind, texts in COMPARED.items():
        yield kind, (*texts, *combining) if kind == "decomposed" else texts
    yield "special-tokens", special
    yield "mixtures", _mixtures((*_MIXED, *special))
    yield "characters", characters
    vocabulary = tokenizer.decode_batch(
        [[each] for each in range(tokenizer.get_vocab_size())], skip_special_tokens=False
    )
    yield "vocabulary", sorted({word for word in vocabulary if "\ufffd" not in word and "\0" not in word})
    yield "lengths", _lengths(tokenizer, max_tokens)


def _special_texts(tokenizer: Tokenizer) -> list[str]:
    texts = []
    for token in (token.content for token in tokenizer.get_added_tokens_decoder().values()):
        wide = "".join(chr(ord(letter) + 0xFEE0) if "!" <= letter <= "~" else letter for letter in token)
        for text in (token, f"x{token}y", f"x {token} y", f" \n{token}\n ", token.lower(), token.upper(), wide):
            texts.append(text)
        texts.append(f"{token}{token} {token[:-1]} {token[1:]}")
    return texts


def _mixtures(parts: Sequence[str]) -> list[str]:
    draw = random.Random(7)
    spaces = (*[" "] * 6, "", "\n", "  ", "\t", "\u3000", " \n ")
    return ["".join(draw.choice(parts) + draw.choice(spaces) for _ in range(30)) for _ in range(200)]


def _characters() -> tuple[list[str], list[str]]:
    """A text of each assigned character, and of each that changes the one before it."""
    alone: list[str] = []
    after: list[str] = []
    for code in range(1, sys.maxunicode + 1):
        letter = chr(code)
        category = unicodedata.category(letter)
        if category in ("Cn", "Co", "Cs"):
            continue
        joins = category.startswith("M") or unicodedata.normalize("NFC", "\u1100" + letter) != "\u1100" + letter
        (after if joins else alone).append(f"a{letter}{letter} {letter}1 x{letter}")
    return alone, after


def _lengths(tokenizer: Tokenizer, max_tokens: int) -> list[str]:
    """Texts of about the largest number of tokens, with a special token where they end."""
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:1]
    empty = len(tokenizer.encode("").ids)
    word = next((each for each in ("the", "a", "e") if len(tokenizer.encode(f"{each} {each}").ids) == empty + 2), "the")
    counts = sorted({max(max_tokens - empty + more, 1) for more in (-2, -1, 0, 1, 2, max_tokens)})
    return [text for count in counts for text in (" ".join([word] * count), " ".join([word] * count + special))]
