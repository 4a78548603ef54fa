"""Rules of a normalizer and a pre-tokenizer for each character, read from the tokenizer itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hdexport.package.tokenizer.nodes import SENTINELS, unsupported

BY_CHARACTER = {"BertNormalizer", "Lowercase", "NFD", "NFKD", "StripAccents", "Nmt", "NFC", "NFKC", "Precompiled"}
"""Normalizers of which each character's normal form is read. A character that composes with the next one, by NFC, is
found by the comparison of ids."""

_CODE_POINTS = [chr(code) for code in (*range(1, 0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0x110000))]
"""Those of planes that have characters. At 0 a string ends."""


def _steps(settings: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """Steps of a normalizer or a pre-tokenizer, without the sequences that hold them."""
    if settings is None:
        return []
    if settings["type"] != "Sequence":
        return [settings]
    return [step for each in settings[name] for step in _steps(each, name)]


@dataclass(frozen=True, kw_only=True)
class CharacterRules:
    """A normalizer's rules for each character.

    Attributes:
        removed: characters that vanish.
        spaces: characters that become a space.
        apart: characters that get a space on each side, such as Chinese characters for BERT.
        others: character -> normal form, of other characters.
    """

    removed: frozenset[str] = frozenset()
    spaces: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()
    others: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, normalizer: Any) -> CharacterRules:
        if normalizer is None:
            return cls()
        between = "\u01bb"  # the form of no other character
        characters = [each for each in _CODE_POINTS if each != between and not SENTINELS.match(each)]
        forms = normalizer.normalize_str(between.join(characters)).split(between)
        if len(forms) != len(characters):
            raise unsupported(f"its normalizer changes {between!r}")
        changed = {each: form for each, form in zip(characters, forms, strict=True) if form != each}
        plain = {"", " "}
        if wrong := [each for each, form in changed.items() if form not in plain and "\t" < each < "A"]:
            raise unsupported(f"its normalizer changes {', '.join(map(repr, wrong))}")
        return cls(
            removed=frozenset(each for each, form in changed.items() if form == ""),
            spaces=frozenset(each for each, form in changed.items() if form == " "),
            apart=frozenset(each for each, form in changed.items() if form == f" {each} "),
            others={each: form for each, form in changed.items() if form not in plain | {f" {each} "}},
        )

    def rewrites(self) -> tuple[tuple[str, str], ...]:
        """(pattern, replacement) for the characters that vanish, become a space, or get spaces around them."""
        forms = ((self.removed, ""), (self.spaces, " "), (self.apart, r" \1 "))
        return tuple((f"({character_class(characters)})", form) for characters, form in forms if characters)


def character_class(characters: Iterable[str]) -> str:
    """A class of RE2 of these characters."""
    codes = sorted(map(ord, characters))
    ranges = []
    for _, run in itertools.groupby(enumerate(codes), lambda pair: pair[1] - pair[0]):
        first, *rest = (code for _, code in run)
        ranges.append(f"\\x{{{first:X}}}" + (f"-\\x{{{rest[-1]:X}}}" if rest else ""))
    return f"[{''.join(ranges)}]"


def required_steps(settings: Mapping[str, Any] | None, name: str, known: Iterable[str], part: str) -> list[Any]:
    steps = _steps(settings, name)
    for step in steps:
        if step["type"] not in known:
            raise unsupported(f"its {part} has the step {step['type']}; {', '.join(sorted(known))} have operators")
    return steps


def isolated(pre_tokenizer: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Characters that a pre-tokenizer makes words of their own, and those that it drops."""
    letter = "a"
    characters = [each for each in _CODE_POINTS if each != letter and not SENTINELS.match(each)]
    words = [word for word, _ in pre_tokenizer.pre_tokenize_str(letter.join(["", *characters, ""]))]
    apart = frozenset(word for word in words if len(word) == 1 and word != letter)
    kept = {each for word in words for each in word}
    return apart, frozenset(each for each in characters if each not in kept)
