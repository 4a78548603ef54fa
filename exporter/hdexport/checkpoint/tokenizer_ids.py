"""The ids of a checkpoint's ``tokenizer.json`` and of transformers' tokenizer, compared on texts of many kinds.

The named classes of transformers 5 take the vocabulary of ``tokenizer.json`` and make its normalizer and its splitting
anew, so that the file's other readers may give other ids. The library also passes over keys of
``tokenizer_config.json`` that its fourth version followed: the ids show whether a key is followed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hdexport.support.json_files import listing, shown

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_TEXTS = 240

_PAIRS = 20

_MOST_ADDED = 40
"""Added tokens that texts contain; some tokenizers have thousands, all alike."""

_MOST_SHOWN = 16
"""Tokens of a text in a message."""

_PLAIN = (
    "Ada wrote a naïve book in 1843.", "BERLIN is a city, NaSa isn't", "the river flows", "两个字 in 北京大学",
    "\uff21\uff22\uff23 \ufb01ve ½ x²", "two  spaces,\ta tab\nand a line ", " before and after ",
    "3.14 1,000 2024-01-31", "“quotes” don't… a-b_c", "👩\u200d👧 🇩🇪 👍🏽", "e\u0301 ñ Å ß İ",
)  # fmt: skip
"""Texts that show a difference in a message, before those that only tests would have."""

_ODD = (
    "", " ", "  a  b ", "\t\n", "a\r\nb", "a\u00a0b\u3000c", "a\u200bb\u00adc", "a\x1cb\x85c", "a\x00\ufffd\ufeff",
    "Straße İstanbul ŒUVRE", "nai\u0308ve naïve", "e\u0301\u0323", "ﬁ ½ ² \u2167 \u2460", "\uff21\uff42\uff43\uff11",
    "\U0001d518\U0001d52b \ue000", "''quoted`` \u201cquoted\u201d", "don't I'm we'll", "3.14 1,000 10^-5", "!?.,;:",
    "https://example.org/a?b=c#d", "snake_case CamelCase", "a-b\u2014c\u2026d", "MKTAYIAKQR", "x" * 120, "Привет",
    "北京大学 東京都 서울", "今天天气非常好。", "すもももももももものうち", "مرحبا بالعالم", "שלום", "हिन्दी भाषा",
    "ภาษาไทย", "👩\u200d👩\u200d👧 🇩🇪 👍🏽", "<s>a</s>", "[CLS] a [SEP]", "<mask>", "a[MASK]b <pad>",
)  # fmt: skip
"""Texts that tokenizers often split differently."""

Sample = tuple[str] | tuple[str, str]
"""A text, or a pair of texts."""


def _sample_texts(tokenizer: Any) -> list[str]:
    """Texts of many kinds, the tokenizer's added tokens between letters, and words of the vocabulary with something
    between."""
    choice = random.Random(0)
    words = [*sorted(tokenizer.get_vocab()), *_ODD]
    added = [token.content for _, token in sorted(tokenizer.added_tokens_decoder.items())]
    added = choice.sample(added, _MOST_ADDED) if len(added) > _MOST_ADDED else added

    def made() -> Iterator[str]:
        yield from _PLAIN
        yield from _ODD
        for content in added:
            yield from (f"a {content} b", f"a{content.upper()}b {content.lower()}")
        while True:
            count, between = choice.randint(1, 12), choice.choice(("", " ", "  ", "\n", "-", ". "))
            yield between.join(choice.choice(words) for _ in range(count))

    return list(itertools.islice(made(), max(_TEXTS, len(_PLAIN) + len(_ODD) + 2 * len(added))))


def _samples(tokenizer: Any) -> list[Sample]:
    """The sample texts, and pairs of some: pairs follow from the frame of a text, so that a few suffice."""
    texts = _sample_texts(tokenizer)
    # transformers ignores an empty second text.
    pairs = itertools.pairwise(filter(None, texts[:_PAIRS]))
    return [*((text,) for text in texts), *pairs]


def backend_of(tokenizer: Any) -> Tokenizer:
    """The ``tokenizers.Tokenizer`` of a tokenizer of transformers, without the truncation and the padding of its file
    or of an earlier call."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend


def gives_ids_of(converted: Tokenizer, tokenizer: Any) -> bool:
    """Whether a ``tokenizers.Tokenizer`` gives the ids that a call of a tokenizer of transformers gives."""
    for sample in _samples(tokenizer):
        try:
            expected = tokenizer(*sample, verbose=False)["input_ids"]
        except Exception:
            # Some classes fail on vocabularies of other models, and then no ids are the same.
            return False
        if converted.encode(*sample).ids != expected:
            return False
    return True


class TokenizerMismatch(NamedTuple):
    """The first sample that two tokenizers encode differently, its tokens by each, and how many of the samples
    differ."""

    sample: Sample
    by_file: str
    by_library: str
    differing: int
    samples: int


def tokenizer_mismatch(file: Any, library: Any) -> TokenizerMismatch | None:
    """The difference of two tokenizers of transformers in ids, or in token types where the model reads them; None for
    none."""
    reads_types = "token_type_ids" in library.model_input_names
    first: tuple[Sample, tuple[Encoding | None, ...]] | None = None
    samples, count, both = _samples(library), 0, (backend_of(file), backend_of(library))
    for each in samples:
        pair = tuple(_encoded(tokenizer, each) for tokenizer in both)
        ids, types = ([None if item is None else getattr(item, of) for item in pair] for of in ("ids", "type_ids"))
        if ids[0] != ids[1] or (reads_types and types[0] != types[1]):
            first, count = first or (each, pair), count + 1
    if first is None:
        return None
    # Tokens may be equal where ids or types are not.
    shown_tokens = next(
        (words for attribute in ("tokens", "ids", "type_ids") if (words := _words(attribute, *first[1]))),
        ("", ""),
    )
    return TokenizerMismatch(first[0], *shown_tokens, count, len(samples))


def _encoded(tokenizer: Tokenizer, sample: Sample) -> Encoding | None:
    """None where the tokenizer has no token for a part of the text, and none for unknown parts."""
    try:
        return tokenizer.encode(*sample)
    except Exception as error:
        if type(error) is not Exception:  # tokenizers raises nothing more specific
            raise
        return None


def _words(attribute: str, *encodings: Encoding | None) -> tuple[str, str] | None:
    """An attribute of two encodings as words; None where the words are equal."""
    first, second = (["an error"] if each is None else [str(v) for v in getattr(each, attribute)] for each in encodings)
    if first == second:
        return None
    # Long texts are shown from shortly before the first difference.
    same = sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(first, second, strict=False)))
    start = max(0, same - _MOST_SHOWN // 2)
    name = "" if attribute == "tokens" else f"{attribute} "
    return _joined(name, first, start), _joined(name, second, start)


def _joined(name: str, words: Sequence[str], start: int) -> str:
    part = words[start : start + _MOST_SHOWN]
    before, after = "... " if start else "", " ..." if start + len(part) < len(words) else ""
    return name + before + " ".join(part) + after


class _Setting(NamedTuple):
    """A setting of ``tokenizer_config.json``: whether a tokenizer does what `true` asks for, a text that shows it, and
    the part of ``tokenizer.json`` that says it."""

    is_done: Callable[[Any, str], bool]
    text: str
    part: str


def _normalized(tokenizer: Any, text: str) -> str:
    normalizer = tokenizer.backend_tokenizer.normalizer
    return text if normalizer is None else str(normalizer.normalize_str(text))


def _split(tokenizer: Any, text: str) -> list[str]:
    splitter, text = tokenizer.backend_tokenizer.pre_tokenizer, _normalized(tokenizer, text)
    return [text] if splitter is None else [word for word, _ in splitter.pre_tokenize_str(text)]


def _strips_accents(tokenizer: Any, text: str) -> bool:
    return _normalized(tokenizer, text).strip("\u2581 ") == "e"


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(backend_of(tokenizer).encode(text).ids)


_SETTINGS: Mapping[str, _Setting] = {
    "add_bos_token": _Setting(lambda of, text: _ids(of, text)[:1] == [of.bos_token_id], "a", "post_processor"),
    "add_eos_token": _Setting(lambda of, text: _ids(of, text)[-1:] == [of.eos_token_id], "a", "post_processor"),
    "do_lower_case": _Setting(
        lambda of, text: _normalized(of, text) == _normalized(of, text.lower()), "A", "normalizer"
    ),
    "strip_accents": _Setting(_strips_accents, "\u00e9", "normalizer"),
    "keep_accents": _Setting(lambda of, text: not _strips_accents(of, text), "\u00e9", "normalizer"),
    "tokenize_chinese_chars": _Setting(
        lambda of, text: len(_split(of, text)) == len(text), "\u5317\u4eac", "normalizer"
    ),
    "add_prefix_space": _Setting(
        lambda of, text: _split(of, text)[0][:1] in ("\u2581", "\u0120", " "), "a", "pre_tokenizer"
    ),
    "split_special_tokens": _Setting(
        lambda of, _: bool(of.backend_tokenizer.encode_special_tokens), "a", "added_tokens"
    ),
}

FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized")
"""What decides where an added token is found."""


def ignored_tokenizer_keys(tokenizer: Any, values: Mapping[str, Any], *, file: str) -> Iterator[str]:
    """A line for each setting of a ``tokenizer_config.json`` whose ids are not the tokenizer's; `file` names it."""
    for key, setting in _SETTINGS.items():
        value = values.get(key)
        if not isinstance(value, bool) or setting.is_done(tokenizer, setting.text) == value:
            continue
        encoded = _encoded(backend_of(tokenizer), (setting.text,))
        tokens = "an error" if encoded is None else " ".join(encoded.tokens)
        yield (
            f"{file} has {key} {str(value).lower()}, which the ids do not follow: {setting.text!r} becomes {tokens}. "
            f"If the model was trained with it, change the {setting.part} of tokenizer.json."
        )
    wrong = [f"{shown(content)} ({number})" for number, content in _other_tokens(tokenizer, values)]
    if wrong:
        yield (
            f"{file} has added_tokens_decoder with tokens that the tokenizer has not, or finds elsewhere in a text: "
            f"{listing(wrong, limit=6)}. If the model was trained with them, add them to tokenizer.json."
        )


def _other_tokens(tokenizer: Any, values: Mapping[str, Any]) -> Iterator[tuple[int, object]]:
    """The added tokens of a ``tokenizer_config.json`` that differ from the tokenizer's."""
    listed = values.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    there = tokenizer.added_tokens_decoder
    for number, token in listed.items():
        if not isinstance(token, dict) or not str(number).isdecimal():
            continue
        own = there.get(int(number))
        if own is None or any(name in token and getattr(own, name) != token[name] for name in FLAGS):
            yield int(number), token.get("content")
