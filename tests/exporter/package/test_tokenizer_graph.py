"""Tokenizers as graphs: the ids of the tokenizers library for any text, or a difference that is found and named."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from hdexport.package.tokenizer import characters, check, graph
from hdexport.package.tokenizer.check import KINDS, differences
from hdruntime.errors import InputError
from hdruntime.optional import is_installed
from support.mixed_texts import text_of
from support.trained_tokenizers import CODE_POINTS, TOKENIZERS, trained_tokenizer

pytestmark = pytest.mark.skipif(
    not is_installed("onnxruntime_extensions"), reason="onnxruntime-extensions is not installed"
)
PAD = 1
DECOMPOSED = ("e\u0301\u0302", "\u1112\u1161\u11ab")
LONG = "x" * 130
NOT_HAD = {
    "ModernBERT": DECOMPOSED,
    "XLM-RoBERTa": (*DECOMPOSED, LONG),
    "BGE-M3": (*DECOMPOSED, LONG),
    "Unigram, any spaces": (LONG,),
}
"""What has other ids: characters that a normalizer composes, or whose second accent it drops; pieces whose scores are
equal in any order, which the tokenizers library adds in float64 and SentencePiece in float32."""

TEXTS = [text_of(30, seed).replace("\0", "") for seed in range(60)] + [
    *("", " ", "\n", "a", "</s>", "x</s>y <mask> z", "  <mask>", "\uff1cs\uff1e", "<|endoftext|> a<|endoftext|>"),
    *(" \n a", "a  \n  b", "a\u00a0\u3000", "\u00b4\u00a8 \u00bd\u2026", "\x85 a\u2028b"),
]


@pytest.fixture(autouse=True)
def few_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every character of Unicode takes a second."""
    monkeypatch.setattr(characters, "_CODE_POINTS", CODE_POINTS)


def ids_of(tokenizer: Tokenizer, **options: Any) -> Callable[[Sequence[str]], list[list[int]]]:
    from hdexport.package.targets.text_in import _ids_of

    options = {"max_tokens": 2**31, "pad_id": PAD} | options
    return _ids_of(graph.tokenizer_model(graph.tokenizer_graph(tokenizer), opset=17, **options))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_graph_gives_the_ids_of_the_tokenizer(name: str) -> None:
    tokenizer = trained_tokenizer(name)
    texts = [
        functools.reduce(lambda text, part: text.replace(part, "y"), NOT_HAD.get(name, ()), text) for text in TEXTS
    ]
    expected = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    found = ids_of(tokenizer)
    assert found(texts) == expected
    assert [found([text])[0] for text in texts[-15:]] == expected[-15:]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["BERT", "RoBERTa", "XLM-RoBERTa"])
def test_a_long_text_is_truncated_and_keeps_its_closing_token(name: str, side: Any) -> None:
    tokenizer = Tokenizer.from_str(trained_tokenizer(name).to_str())
    texts = [" ".join(["the"] * count) for count in (0, 5, 6, 7, 8, 40)] + ["the the the the the the</s> the"]
    tokenizer.enable_truncation(8, direction=side)
    expected = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    assert max(map(len, expected)) == 8
    tokenizer.no_truncation()
    assert ids_of(tokenizer, max_tokens=8, truncation_side=side)(texts) == expected


def test_a_batch_is_padded_by_the_models_token_and_masked() -> None:
    import numpy as np
    import onnx_ir as ir

    from hdexport.package.targets.text_in import _session

    tokenizer = trained_tokenizer("BERT")
    model = graph.tokenizer_model(
        graph.tokenizer_graph(tokenizer), opset=18, max_tokens=100, pad_id=3, prompt="flows: "
    )
    texts = ["the river", "", "the"]
    ids, mask = _session(ir.to_proto(model).SerializeToString()).run(None, {"input": np.array(texts, dtype=object)})
    rows = [encoding.ids for encoding in tokenizer.encode_batch([f"flows: {text}" for text in texts])]
    longest = max(map(len, rows))
    assert ids.tolist() == [row + [3] * (longest - len(row)) for row in rows]
    assert mask.tolist() == [[1] * len(row) + [0] * (longest - len(row)) for row in rows]


def test_texts_of_every_kind_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_characters", lambda: (["a\u00df\u00df"], ["ae\u0308"]))
    tokenizer = Tokenizer.from_str(trained_tokenizer("ModernBERT").to_str())
    whole, cut = ids_of(tokenizer), ids_of(tokenizer, max_tokens=16)
    tokenizer.enable_truncation(16)
    (found,) = differences(whole, cut, tokenizer, max_tokens=16)
    assert found.kind == "decomposed"
    assert 0 < found.texts < found.compared
    assert found.actual != found.expected


def test_wrong_ids_are_found_in_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_characters", lambda: (["a\u00df\u00df"], ["ae\u0308"]))
    tokenizer = Tokenizer.from_str(trained_tokenizer("BERT").to_str())
    whole = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.enable_truncation(16)

    def without_the_last(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids[:-1] for encoding in whole.encode_batch(texts)]

    found = differences(without_the_last, without_the_last, tokenizer, max_tokens=16)
    assert [each.kind for each in found] == list(KINDS)
    assert all(each.texts == each.compared for each in found)


def with_settings(name: str, **changes: Any) -> Tokenizer:
    settings = json.loads(trained_tokenizer(name).to_str())
    for part, values in changes.items():
        settings[part] = {**(settings[part] or {}), **values} if isinstance(values, dict) else values
    return Tokenizer.from_str(json.dumps(settings))


def with_token(token: AddedToken) -> Tokenizer:
    tokenizer = Tokenizer.from_str(trained_tokenizer("BERT").to_str())
    tokenizer.add_tokens([token])
    return tokenizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), "its model is WordLevel; WordPiece, BPE"),
        (lambda: with_settings("BERT", model={"max_input_chars_per_word": 200}), "words have up to 200 characters"),
        (lambda: with_settings("BERT", normalizer={"clean_text": False}), "its normalizer keeps control characters"),
        (
            lambda: with_settings("BERT", pre_tokenizer={"type": "Whitespace"}),
            "its pre-tokenizer has the step Whitespace; BertPreTokenizer, Punctuation, WhitespaceSplit have operators",
        ),
        (lambda: with_settings("RoBERTa", model={"byte_fallback": True}), "its model has byte_fallback"),
        (
            lambda: with_settings("RoBERTa", pre_tokenizer={"use_regex": False}),
            "its pre-tokenizer is not ByteLevel with GPT-2's pattern",
        ),
        (
            lambda: with_settings("XLM-RoBERTa", pre_tokenizer={"type": "WhitespaceSplit"}),
            "its pre-tokenizer is not Metaspace that is put before every text",
        ),
        (
            lambda: with_settings("XLM-RoBERTa", normalizer=json.loads(
                normalizers.Replace("``", '"').__getstate__()  # type: ignore[attr-defined]
            )),
            "its normalizer replaces {'String': '``'}",
        ),
        (lambda: with_token(AddedToken("river", single_word=True)), r"its token 'river' is one only between words"),
        (lambda: with_token(AddedToken("River", normalized=True)), "its token 'River' is normalized to 'river'"),
        (lambda: with_token(AddedToken("a\tb", normalized=False)), r"its token 'a\tb' has control characters"),
    ],
)  # fmt: skip
def test_a_tokenizer_without_operators_is_refused_by_its_part(make: Callable[[], Tokenizer], reason: str) -> None:
    with pytest.raises(InputError) as raised:
        graph.tokenizer_graph(make())
    assert f"cannot tokenize as this bundle does: {reason}" in str(raised.value)
    assert "target='onnx'" in str(raised.value)


def test_a_pre_tokenizer_of_punctuation_and_spaces_is_berts() -> None:
    tokenizer = Tokenizer.from_str(trained_tokenizer("BERT").to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    assert ids_of(tokenizer)(TEXTS) == [encoding.ids for encoding in tokenizer.encode_batch(TEXTS)]
