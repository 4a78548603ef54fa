"""A long text that is cut has the tokens of the whole text, though only a part of it is tokenized."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from hdruntime.bundle.manifest import Side
from hdruntime.errors import InputError
from hdruntime.text import partial_texts
from hdruntime.text.encoding import Encoding
from hdruntime.text.partial_texts import PartialTexts
from hdruntime.text.tokenization import TextTokenizer
from support.mixed_texts import PARTS, text_of

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def trained(model: Any, normalizer: Any, pre_tokenizer: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    common = {"vocab_size": 400, "show_progress": False, "special_tokens": ["<unk>"]}
    trainer = {
        models.WordPiece: lambda: trainers.WordPieceTrainer(**common),
        models.Unigram: lambda: trainers.UnigramTrainer(unk_token="<unk>", **common),
        models.BPE: lambda: trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **common),
    }[type(model)]()
    tokenizer.train_from_iterator([text_of(40, seed) for seed in range(40)], trainer)
    tokenizer.add_tokens(
        [AddedToken("<mask>", lstrip=True), AddedToken("[SEP]"), AddedToken("multi word", single_word=True)]
    )
    return tokenizer


def with_whole_words(tokenizer: Tokenizer) -> Tokenizer:
    """The same vocabulary, in which no token has a space inside, for a model that reads a text as one word."""
    settings = json.loads(tokenizer.to_str())
    settings["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    settings["pre_tokenizer"] = None
    return Tokenizer.from_str(json.dumps(settings))


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "BERT": lambda: trained(
        models.WordPiece(unk_token="<unk>"), normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    ),
    "BERT, cased": lambda: trained(
        models.WordPiece(unk_token="<unk>", max_input_chars_per_word=20),
        normalizers.BertNormalizer(lowercase=False, strip_accents=False, handle_chinese_chars=False),
        pre_tokenizers.BertPreTokenizer(),
    ),
    "RoBERTa": lambda: trained(models.BPE(), None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "Qwen": lambda: trained(
        models.BPE(),
        normalizers.NFC(),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN), "isolated"), BYTES]),
    ),
    "bytes in one word": lambda: trained(models.BPE(), None, BYTES),
    "Gemma": lambda: with_whole_words(
        trained(models.BPE(unk_token="<unk>", fuse_unk=True), None, pre_tokenizers.Metaspace())
    ),
    "XLM-RoBERTa": lambda: trained(
        models.Unigram(),
        normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
        pre_tokenizers.Metaspace(),
    ),
    "ALBERT": lambda: trained(
        models.Unigram(),
        normalizers.Sequence(
            [normalizers.Strip(), normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
        ),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    ),
    "Unigram in one word": lambda: with_whole_words(trained(models.Unigram(), None, pre_tokenizers.Metaspace())),
}


@functools.cache
def tokenizer_of(name: str) -> Tokenizer:
    return TOKENIZERS[name]()


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_that_count_as_settled_are_the_whole_texts_wherever_it_is_cut(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Far less than in a text that is worth it: cuts are near every kind of boundary.
    monkeypatch.setattr(partial_texts, "_LOOK_AHEAD", 24)
    tokenizer = tokenizer_of(name)
    parts = PartialTexts(tokenizer)
    settled = dict.fromkeys(("right", "left"), 0)
    for seed in range(2):
        # A token that goes on beyond a space, and one that would begin there.
        text = f"{text_of(30, seed)} a multi word flows {text_of(30, seed + 10)}"
        whole = ids_of(tokenizer, text)
        for size in range(30, len(text), 2):
            for side, part in (("right", text[:size]), ("left", text[-size:])):
                tokens = parts._settled(part, side)  # type: ignore[arg-type]
                found = ids_of(tokenizer, part)
                assert len(found) >= tokens
                if side == "right":
                    assert found[:tokens] == whole[:tokens], part[-80:]
                else:
                    assert found[len(found) - tokens :] == whole[len(whole) - tokens :], part[:80]
                settled[side] += tokens > len(found) / 3
    # Of vocabularies that join words, and of scores that add up from the other side, few tokens are known.
    joins = name in ("bytes in one word", "Unigram in one word")
    assert settled["right"] > (10 if joins else 100), "cuts that leave a third of the tokens"
    assert settled["left"] > (10 if joins else 100)


class Recorder:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.characters = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, *texts: str, **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode(*texts, **options)


@functools.cache
def saved(name: str, folder: Path) -> Path:
    tokenizer = Tokenizer.from_str(tokenizer_of(name).to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<unk> $A <unk>", pair="<unk> $A <unk> $B:1 <unk>:1", special_tokens=[("<unk>", 0)]
    )
    path = folder / f"{len(list(folder.iterdir()))}.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


def whole_encodings(tokenizer: TextTokenizer, text: str, pair: str | None) -> Encoding:
    """The library's, of the whole text."""
    item = tokenizer._truncating.encode(text, pair)
    return Encoding(item.ids, item.type_ids, item.offsets, item.sequence_ids, is_truncated=bool(item.overflowing))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["BERT", "Qwen", "XLM-RoBERTa"])
def test_texts_and_pairs_are_cut_as_the_library_cuts_them_whole(
    name: str, side: Side, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of an encoding: ids, types, places in the whole text; an odd token of a pair is the longer text's."""
    texts = {
        "long": text_of(300, 1),
        "longer": text_of(420, 2),
        "short": text_of(3, 3),
        "some": text_of(30, 4),
        "no spaces": "".join(PARTS).replace(" ", "") * 8,
    }
    # The library makes as many pieces of a pair as the two texts' pieces multiplied: so the texts are not very long.
    monkeypatch.setattr(partial_texts, "_LOOK_AHEAD", 128)
    pairs = [("long", None), ("no spaces", None), ("long", "longer"), ("longer", "long"), ("short", "long")]
    pairs += [("longer", "some"), ("no spaces", "long")]
    for max_len in (31, 32):
        tokenizer = TextTokenizer(saved(name, folder), max_len=max_len, truncation_side=side)
        for first, second in pairs:
            pair = None if second is None else texts[second]
            (found,) = tokenizer.encode([texts[first]], None if pair is None else [pair], overflow="truncate")
            assert found == whole_encodings(tokenizer, texts[first], pair), (max_len, first, second)
            # Without offsets, alone and several at once; BERT's pairs have a second type.
            given = [texts[first]] * 2, None if pair is None else [pair] * 2
            alone = tokenizer.encode(*(each and each[:1] for each in given), overflow="truncate", offsets=False)
            for bare in (*alone, *tokenizer.encode(*given, overflow="truncate", offsets=False)):
                assert bare.input_ids == found.input_ids == bare.ids.tolist()
                assert bare.token_type_ids == found.token_type_ids == bare.types.tolist()
                assert (bare.is_truncated, len(bare)) == (found.is_truncated, len(found))
                assert bare.given_tokens == found.given_tokens
                assert repr(bare) == repr(found)
                with pytest.raises(AttributeError, match="no offsets: its text was encoded without"):
                    _ = bare.offsets


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["BERT", "Qwen", "XLM-RoBERTa"])
def test_the_tokens_of_a_truncated_text_are_counted_where_all_of_it_was_read(
    name: str, side: Side, folder: Path
) -> None:
    """As many as the library finds in the full text or pair, whichever of a pair's texts were truncated."""
    tokenizer = TextTokenizer(saved(name, folder), max_len=33, truncation_side=side)
    some = {parts: text_of(parts, parts) for parts in (1, 5, 8, 13, 20, 60)}
    pairs = [(first, second) for first in some.values() for second in (None, *some.values())]
    truncated = 0
    for first, second in pairs:
        full = len(tokenizer.whole.encode(first, second))
        (found,) = tokenizer.encode([first], None if second is None else [second], overflow="truncate")
        assert (found.given_tokens, found.is_truncated, len(found)) == (full, full > 33, min(full, 33))
        truncated += found.is_truncated
    assert 10 < truncated < len(pairs)
    very_long = text_of(5000, 1)
    for texts in ((very_long, None), (some[1], very_long), (very_long, very_long)):
        (found,) = tokenizer.encode(*(each and [each] for each in texts), overflow="truncate")
        assert (found.given_tokens, found.is_truncated) == (None, True)
    # A limit of each text comes first: what it removes is counted, too.
    limited = tokenizer.limited(33, text=3, pair=4)
    (found,) = limited.encode([some[13]], [some[60]])
    assert (found.given_tokens, found.is_truncated) == (len(tokenizer.whole.encode(some[13], some[60])), True)
    assert len(found) <= 3 + 4 + 3
    (found,) = limited.encode([some[13]], [very_long])
    assert (found.given_tokens, found.is_truncated) == (None, True)


@pytest.mark.parametrize("overflow", ["truncate", "error"])
def test_of_a_text_that_is_cut_or_refused_a_part_is_tokenized(folder: Path, overflow: str) -> None:
    tokenizer = TextTokenizer(saved("BERT", folder), max_len=64)
    recorders = Recorder(tokenizer.whole), Recorder(tokenizer._truncating)
    tokenizer._parts = PartialTexts(recorders[0])
    tokenizer.whole, vars(tokenizer)["_truncating"] = recorders
    text = "the river flows " * 100_000
    if overflow == "error":
        message = r"The text has 1600000 characters and more than 64 tokens; this bundle accepts 1 to 64\.\nTruncate it"
        with pytest.raises(InputError, match=message):
            tokenizer.encode([text])
        with pytest.raises(InputError, match="Text 1 has 1600000 characters"):
            tokenizer.encode(["the", text])
    else:
        (encoding,) = tokenizer.encode([text], overflow=overflow)
        assert encoding.is_truncated
        assert len(encoding) == 64
    assert 64 < sum(recorder.characters for recorder in recorders) < 20_000


FAR = {
    "FixedLength": pre_tokenizers.FixedLength(length=5),
    "a run of anything": pre_tokenizers.Split(Regex(r".+x|\w+|\s"), "isolated"),
    "digits from the right": pre_tokenizers.Split(Regex(r"\d{1,3}(?=(?:\d{3})*\b)|\D"), "isolated"),
    "the end": pre_tokenizers.Split(Regex(r"\w+$|\w|\s"), "isolated"),
    "what is not a line": pre_tokenizers.Split(Regex(r"[^\n]+"), "isolated"),
}


@pytest.mark.parametrize("name", FAR)
def test_a_tokenizer_that_may_see_further_reads_the_whole_text(name: str) -> None:
    tokenizer = trained(models.BPE(), None, pre_tokenizers.Sequence([FAR[name], BYTES]))
    text = "the river flows " * 4000
    assert PartialTexts(tokenizer).of(text, tokens=16, side="right") == text


def test_a_tokenizer_that_sees_further_would_be_wrong_and_is_told_apart() -> None:
    """The check above is not idle: read in part, this one, which counts from the start of a text, has other tokens."""
    tokenizer = trained(models.BPE(), None, pre_tokenizers.Sequence([FAR["FixedLength"], BYTES]))
    text = "the river flows " * 4000 + "on"
    parts = PartialTexts(tokenizer)
    vars(parts)["_is_local"] = True
    part = parts.of(text, tokens=16, side="left")
    assert len(part) < len(text)
    assert ids_of(tokenizer, part)[-16:] != ids_of(tokenizer, text)[-16:]


@pytest.mark.parametrize(
    ("pattern", "sees_far"),
    [
        *((pattern, False) for pattern in (QWEN, GPT_2, " {2,}", r"\s+", r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"\S+|\s")),
        *((pattern, True) for pattern in (".*", r"[\s\S]+", r"\P{L}+", "a$", "^a", r"(?<=x)y", r"\D+", r"(?!x)y")),
    ],
)
def test_regular_expressions_that_may_see_far_are_told_apart(pattern: str, sees_far: bool) -> None:
    assert partial_texts._sees_far(pattern) is sees_far


def test_a_vocabulary_that_joins_words_reads_the_whole_text() -> None:
    """A model that reads a text as one word may merge characters beyond a space, and others because of that."""
    settings = json.loads(tokenizer_of("Gemma").to_str())
    text = "the river flows " * 4000
    assert len(PartialTexts(tokenizer_of("Gemma")).of(text, tokens=16, side="right")) < 4000
    vocabulary = settings["model"]["vocab"]
    vocabulary["r▁"] = len(vocabulary)
    settings["model"]["merges"].append(["r", "▁"])
    assert PartialTexts(Tokenizer.from_str(json.dumps(settings))).of(text, tokens=16, side="right") == text


def test_a_bounded_tokenizer_refuses_what_it_would_have_to_read_whole(folder: Path) -> None:
    tokenizer = TextTokenizer(saved("XLM-RoBERTa", folder), max_len=16).bounded(10_000)
    long = "the river flows " * 4000
    assert len(tokenizer.encode([long], overflow="truncate")[0]) == 16
    message = "The text has {} characters; at most 10000 can be tokenized in full"
    with pytest.raises(InputError, match=message.format(64000)):
        tokenizer.encode([long], overflow="split")
    with pytest.raises(InputError, match=message.format(50000)):
        tokenizer.encode(["a" * 50000], overflow="truncate")
    with pytest.raises(InputError, match=message.format(50000)):
        tokenizer.encode(["the"], ["a" * 50000], overflow="truncate")
    assert len(tokenizer.encode(["a" * 9000], overflow="truncate")[0]) == 16
    assert tokenizer.limited(8).bounded(20_000).encode([long], overflow="truncate")[0].is_truncated
