"""Special tokens around a text, by which ids of another tokenizer are told apart; and beginnings of so many tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from hdruntime.bundle.manifest import Side
from hdruntime.errors import InputError
from hdruntime.text.tokenization import TextTokenizer
from support.comparators import named_case

SPECIAL = ["<s>", "</s>", "<unk>", "<lang>"]
TEXTS = (
    "What is read, and by whom? Nobody reads whole documents; everybody reads beginnings of them, again and again.",
    "  blanks   between  and after \n\n lines  ",
    "naïve café, ﬁne ﬂow, Ⅷ ½ e\u0301 — 你好吗 한국어 ไทย 👩‍👩‍👧 🇩🇪",
)


def trained(kind: str) -> Tokenizer:
    """A small tokenizer of a kind that models have, whose special tokens have the ids 0 to 3."""
    if kind == "WordPiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=150, special_tokens=SPECIAL)
    elif kind == "BPE":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet)
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>")
    tokenizer.train_from_iterator([*TEXTS] * 3, trainer)
    return tokenizer


KINDS = ("WordPiece", "BPE", "Unigram")


def saved(tokenizer: Tokenizer, path: Path, side: Side = "right") -> TextTokenizer:
    tokenizer.save(str(path / "tokenizer.json"))
    return TextTokenizer(path / "tokenizer.json", max_len=10_000, truncation_side=side)


TEMPLATES: dict[str, tuple[str | None, list[int], list[int]]] = {
    "both": ("<s> $A </s>", [0], [1]),
    "first": ("<s> $A", [0], []),
    "last": ("$A </s>", [], [1]),
    "several": ("<s> <lang> $A </s> <s>", [0, 3], [1, 0]),
    "none": ("$A", [], []),
    "no template": (None, [], []),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_without_the_special_tokens_around_a_text_are_refused(kind: str, name: str, tmp_path: Path) -> None:
    template, first, last = TEMPLATES[name]
    made = trained(kind)
    if template is not None:
        special = [(token, number) for number, token in enumerate(SPECIAL)]
        made.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    tokenizer = saved(made, tmp_path)
    assert tokenizer.special_ids == (first, last)
    for text in ("", *TEXTS):
        ids = tokenizer.whole.encode(text).ids
        assert tokenizer.checked_ids(ids) == ids, "a text's own ids fit"
    bare = tokenizer.whole.encode(TEXTS[0], add_special_tokens=False).ids
    half = ([first + bare] if last else []) + ([bare + last] if first else [])
    inverse = [last + bare + first] if first + last and first != last else []
    for ids in [[], bare, bare[:1], *half, *inverse] if first + last else []:
        with named_case(ids), pytest.raises(InputError, match="another tokenizer made them") as refused:
            tokenizer.checked_ids(ids)
        assert all(f"{number} ({SPECIAL[number]})" in str(refused.value) for number in first + last)
    if not first + last:
        assert tokenizer.checked_ids(bare) == bare, "nothing can be asked"


def test_special_tokens_are_those_of_bert_roberta_and_of_a_tokenizer_without_unknown_words(tmp_path: Path) -> None:
    made = trained("WordPiece")
    for processor in (
        processors.BertProcessing(("</s>", 1), ("<s>", 0)),
        processors.RobertaProcessing(("</s>", 1), ("<s>", 0)),
    ):
        made.post_processor = processor
        assert saved(made, tmp_path).special_ids == ([0], [1])
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "known": 2}))
    words.add_special_tokens(["<s>", "</s>"])
    words.post_processor = processors.BertProcessing(("</s>", 1), ("<s>", 0))
    tokenizer = saved(words, tmp_path)
    assert (tokenizer.sample, tokenizer.special_ids) == ("known", ([0], [1])), "a text of a is an error of this one"


@pytest.mark.parametrize("side", ["right", "left"])
def test_ids_are_cut_as_their_text_is(side: Side, tmp_path: Path) -> None:
    made = trained("BPE")
    special = [(token, number) for number, token in enumerate(SPECIAL)]
    made.post_processor = processors.TemplateProcessing(single="<s> <lang> $A </s>", special_tokens=special)
    tokenizer = saved(made, tmp_path, side)
    ids = tokenizer.whole.encode(TEXTS[0]).ids
    for most in (4, 5, 12, len(ids) - 1, len(ids), len(ids) + 1):
        (cut,) = tokenizer.limited(most).encode([TEXTS[0]], overflow="truncate")
        assert tokenizer.checked_ids(ids, max_len=most) == cut.input_ids


@pytest.mark.parametrize("kind", KINDS)
def test_the_beginning_of_a_text_has_its_first_tokens(kind: str, tmp_path: Path) -> None:
    tokenizer = saved(trained(kind), tmp_path)
    for text in TEXTS:
        whole = tokenizer.whole.encode(text, add_special_tokens=False)
        for tokens in range(1, len(whole) + 2):
            beginning = tokenizer.prefix(text, tokens)
            found = tokenizer.whole.encode(beginning, add_special_tokens=False).ids
            assert text.startswith(beginning)
            # Tokens with a part of a character whose other parts are not kept are left out.
            kept = tokens
            while 0 < kept < len(whole) and whole.offsets[kept][0] < whole.offsets[kept - 1][1]:
                kept -= 1
            with named_case((text, tokens)):
                assert found == whole.ids[:kept]


@pytest.mark.parametrize("kind", KINDS)
def test_a_beginning_is_that_of_the_whole_text_and_reads_little_of_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = saved(trained(kind), tmp_path)
    text = " ".join([*TEXTS, "x" * 200, "ab" * 500, " " * 3000] * 20)
    whole = tokenizer.whole.encode(text, add_special_tokens=False).ids
    real, read = tokenizer.whole, list[int]()

    class Counting:
        def encode(self, text: str, **options: Any) -> Any:
            read.append(len(text))
            return real.encode(text, **options)

    monkeypatch.setattr(tokenizer, "whole", Counting())
    for tokens in (1, 2, 50, 333):
        beginning = tokenizer.prefix(text, tokens)
        found = real.encode(beginning, add_special_tokens=False).ids
        assert found == whole[: len(found)]
        assert tokens - 4 <= len(found) <= tokens
        assert max(read) < len(text) / 3


def test_texts_are_cut_before_pairs_are(bundle_path: Path) -> None:
    tokenizer = TextTokenizer(bundle_path / "tokenizer.json", max_len=8)
    query, document = "read whole documents", "long documents are read whole long long long"

    def ids(**limits: int) -> list[int]:
        (found,) = tokenizer.limited(8, **limits).encode([query], [document], overflow="truncate")
        return found.input_ids

    vocabulary = json.loads((bundle_path / "tokenizer.json").read_text())["model"]["vocab"]
    numbers: Callable[[str], list[int]] = lambda text: [vocabulary[word] for word in text.split()]  # noqa: E731
    cls, sep = [2], [3]
    assert ids(pair=1) == [*cls, *numbers(query), *sep, *numbers("long"), *sep]
    assert ids(text=1, pair=2) == [*cls, *numbers("read"), *sep, *numbers("long documents"), *sep]
    assert ids(text=1) == [*cls, *numbers("read"), *sep, *numbers("long documents are read"), *sep]
    assert ids(pair=99) == ids()
