"""SentenceEncoder has the numbers, the order and the truncation of sentence-transformers, and its own refusals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest

import hdruntime
from hdruntime import SentenceEncoder
from hdruntime.errors import InputError, NonFiniteOutputError
from hdruntime.tasks import text_inference
from hdruntime.tasks.task import Text
from support.comparators import assert_close, named_case
from support.sample_model import SAMPLE_MAX_LEN

SENTENCES = ["long documents are read", "read", "", "documents . . .", "whole documents", "read long", "Are They read"]

BundleMaker = Callable[..., Path]


@pytest.fixture
def encoder(bundle_path: Path) -> Iterator[SentenceEncoder]:
    with SentenceEncoder(bundle_path) as encoder:
        yield encoder


def tokens_of(bundle: Path, sentence: str) -> np.ndarray:
    """int64 [1, tokens]."""
    with hdruntime.load(bundle) as session:
        return np.array([session.tokenize([sentence])[0].input_ids])


# By hand-computed models


def test_order_is_kept_whatever_the_batches(
    encoder: SentenceEncoder, bundle_path: Path, model: Callable[..., np.ndarray]
) -> None:
    for batch_size in [None, 1, 2, 3, 32]:
        with named_case(batch_size):
            expected = np.stack([model(tokens_of(bundle_path, sentence))[0].mean(axis=0) for sentence in SENTENCES])
            vectors = encoder.encode(SENTENCES, batch_size=batch_size)
            assert vectors.dtype == np.float32
            assert_close(vectors, expected, atol=1e-6)


def test_a_long_text_is_truncated_rejected_or_split_as_a_session_does(
    encoder: SentenceEncoder, bundle_path: Path
) -> None:
    long = ["long documents are read whole " * 5, "read"]
    with hdruntime.load(bundle_path) as session:
        for options in (
            {"overflow": "truncate"},
            {"overflow": "split"},
            {"overflow": "split", "stride": 4},
            {"overflow": "split", "split_pooling": "max"},
        ):
            with named_case(options):
                np.testing.assert_array_equal(encoder.encode(long, **options), session.embed(long, **options))
        np.testing.assert_array_equal(encoder.encode(long), session.embed(long, overflow="truncate"))
        np.testing.assert_array_equal(
            encoder.encode_query(long, overflow="split"), session.embed(long, overflow="split")
        )
        states, _ = encoder.encode(long, output_value="token_embeddings", overflow="split", stride=4)
        assert len(states) == len(session.split(long[:1])[0].whole) == 27
    for options, error in (
        ({"overflow": "error"}, r"^sentences\[0\]: The text has 27 tokens; this bundle accepts 1 to 16"),
        ({"overflow": "cut"}, "overflow is 'cut'"),
        ({"stride": 4}, "only overflow='split' has a stride"),
    ):
        with pytest.raises(InputError, match=error):
            encoder.encode(long, **options)  # type: ignore[arg-type]


def test_a_bundle_that_pools_by_itself_is_left_to(new_bundle: BundleMaker) -> None:
    path = new_bundle(task="sentence-similarity")
    with SentenceEncoder(path) as encoder, hdruntime.load(path) as session:
        assert (encoder.encode(SENTENCES) == session.embed(SENTENCES)).all()
    with pytest.raises(InputError, match=r"pooling is 'cls', but this bundle pools .*\n.*task='feature-extraction'"):
        SentenceEncoder(path, pooling="cls")


def test_one_string_gives_one_vector_and_none_give_none(encoder: SentenceEncoder) -> None:
    assert (encoder.encode("read long") == encoder.encode(["read long"])[0]).all()
    assert encoder.encode("read long").shape == (4,)
    assert encoder.encode([]).shape == (0, 4)
    assert encoder.encode([], normalize_embeddings=True).shape == (0, 4)
    assert encoder.get_embedding_dimension() == encoder.get_sentence_embedding_dimension() == 4


def test_long_texts_are_cut_without_a_word(encoder: SentenceEncoder) -> None:
    """The tiny bundle serves 16 tokens, two of which are special."""
    sentence = "long documents " * 8
    assert (encoder.encode(sentence) == encoder.encode("long documents " * 7)).all()
    encoder.max_seq_length = np.int64(5)  # as the maximum of an array
    assert encoder.max_seq_length == 5
    assert (encoder.encode(sentence) == encoder.encode("long documents long")).all()
    assert (encoder.encode(sentence) != encoder.encode("long documents")).any()
    encoder.max_seq_length = "bundle"
    assert encoder.max_seq_length == 16
    assert (encoder.encode(sentence) == encoder.encode("long documents " * 7)).all()


REFUSED_LENGTHS = [
    ("all", r"max_seq_length is 'all'; it must be a number of tokens, 'model' or 'bundle'\."),
    (17, r"max_seq_length is 17; it must be 3 to 16 tokens for this bundle\.\nBuild .* max_len=17\.$"),
    (2, r"max_seq_length is 2; it must be 3 to 16 tokens for this bundle\.$"),
]


@pytest.mark.parametrize(("tokens", "message"), REFUSED_LENGTHS)
def test_a_length_that_the_bundle_does_not_run_is_refused(bundle_path: Path, tokens: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        hdruntime.load(bundle_path, max_seq_length=tokens)
    with pytest.raises(InputError, match=message):
        SentenceEncoder(bundle_path, max_seq_length=tokens)
    with SentenceEncoder(bundle_path, max_seq_length=3) as encoder:
        with pytest.raises(InputError, match=message):
            encoder.max_seq_length = tokens
        assert (encoder.encode("long documents") == encoder.encode("long")).all()


WHAT_DOES_NOT_FIT = [
    (["read", 5], {}, r"sentences\[1\] is 5, of type int; it must be a string"),
    (["read", "long documents", "\ud800"], {}, r"sentences\[2\]: .* not valid Unicode"),
    (["read"], {"batch_size": 0}, "batch_size is 0; it must be 1 or more"),
    (["read"], {"precision": "int4"}, "precision is 'int4'; it must be one of 'float32'"),
    (["read"], {"precision": "int8"}, "A single embedding has no ranges"),
    (["read"], {"output_value": None}, "output_value is None; it must be 'sentence_embedding' or 'token_embeddings'"),
    (["read"], {"device": "cuda:0"}, r"device is 'cuda:0', and the bundle was loaded on cpu \(onnxruntime\)"),
    # Before a text is read.
    (["\ud800"], {"truncate_dim": 5}, "truncated to 5 dimensions; these have 4"),
    (["read"], {"prompt_name": "passage"}, "prompt_name is 'passage'; it must be one of 'query', 'document'"),
]


def test_what_does_not_fit_is_refused(encoder: SentenceEncoder) -> None:
    for sentences, options, message in WHAT_DOES_NOT_FIT:
        with named_case(message), pytest.raises(InputError, match=message):
            encoder.encode(sentences, **options)


@pytest.mark.parametrize(
    ("bundle", "options", "message"),
    [
        ({"task": "text-classification"}, {}, "has no embeddings"),
        (
            {},
            {"pooling": "median"},
            "pooling is 'median'; it must be one of 'cls', 'max', 'mean', 'mean_sqrt_len_tokens', ",
        ),
    ],
)
def test_a_bundle_that_cannot_encode_is_refused(
    new_bundle: BundleMaker, bundle: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        SentenceEncoder(new_bundle(**bundle), **options)


def test_nan_names_the_callers_sentence(encoder: SentenceEncoder) -> None:
    for batch_size in [None, 1, 2]:
        with (
            named_case(batch_size),
            pytest.raises(NonFiniteOutputError, match=r"^sentences\[2\]: The output last_hidden_state holds NaN"),
        ):
            encoder.encode(["read", "long long long", "nan", "documents"], batch_size=batch_size)


def test_few_texts_are_tokenised_at_a_time(encoder: SentenceEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is longer than the bound goes alone."""
    expected = encoder.encode(SENTENCES)
    monkeypatch.setattr(text_inference, "WINDOW_CHARACTERS", 20)
    monkeypatch.setattr(text_inference, "_CHARACTERS_PER_TOKEN", 0)
    monkeypatch.setattr(text_inference, "_WINDOW_TEXTS", 3)
    windows: list[list[int]] = []
    encode = text_inference.TextInference.encode

    def spy(inference: text_inference.TextInference, texts: list[Text]) -> list[text_inference.TextItem]:
        windows.append([len(text.text) for text in texts])
        return encode(inference, texts)

    monkeypatch.setattr(text_inference.TextInference, "encode", spy)
    assert (encoder.encode(SENTENCES) == expected).all()
    assert windows == [[23], [15], [15], [13], [9, 4, 0]]
    windows.clear()
    encoder.encode(["a"] * 7)
    assert [len(window) for window in windows] == [3, 3, 1]


@pytest.mark.parametrize(
    ("option", "level", "shown"),
    [
        (True, logging.WARNING, True),
        (False, logging.DEBUG, False),
        (None, logging.INFO, True),
    ],
)
def test_progress_is_shown_when_asked_for(
    encoder: SentenceEncoder,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    option: bool | None,
    level: int,
    shown: bool,
) -> None:
    with caplog.at_level(level, logger="hdruntime.sentence_encoder"):
        encoder.encode(SENTENCES, show_progress_bar=option)
    output = capsys.readouterr()
    assert output.out == ""
    assert ("100%" in output.err and "7/7" in output.err) == shown
    assert bool(output.err) == shown


# By the real library and the real model

NORMALISED_ATOL = 1e-6
"""Measured: 2.1e-7."""

POOLED_ATOL = 1e-5
"""Of numbers up to 6, whose last bit is 2^-22: some twenty roundings in either."""

OWN_LENGTH = 256
"""Tokens that sentence-transformers cuts texts to for the sample model, which has 512 positions."""


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Of 0 to about 900 tokens."""
    words = " ".join(topics.values()).split()
    chunks = [" ".join(words[100 * n : 100 * n + length]) for n, length in enumerate([3, 40, 1, 17, 40, 90, 600, 4])]
    return ["", *chunks, "Überraschung! 日本語のテキスト and 12,345.67 numbers?"]


def test_the_sample_model_gives_what_sentence_transformers_gives(
    sample: Path, extended_sample: Path, sample_bundle: Path, texts: list[str]
) -> None:
    from sentence_transformers import SentenceTransformer

    theirs, longer = (SentenceTransformer(str(path), device="cpu") for path in (sample, extended_sample))
    expected = theirs.encode(texts)
    with SentenceEncoder(sample_bundle) as ours:
        assert max(len(ours.tokenizer.encode(text)) for text in texts) > SAMPLE_MAX_LEN
        assert ours.max_seq_length == theirs.max_seq_length == OWN_LENGTH
        assert_close(ours.encode(texts), expected, atol=NORMALISED_ATOL)
        with pytest.raises(AssertionError):
            assert_close(ours.encode(texts[::-1]), expected, atol=100 * NORMALISED_ATOL)
        ours.max_seq_length = "bundle"
        assert ours.max_seq_length == longer.max_seq_length == SAMPLE_MAX_LEN
        for batch_size in (None, 3):
            lifted = ours.encode(texts, batch_size=batch_size)
            assert_close(lifted, longer.encode(texts, batch_size=3), atol=NORMALISED_ATOL)
        with pytest.raises(AssertionError):
            assert_close(lifted, expected, atol=100 * NORMALISED_ATOL)


@pytest.fixture(scope="module")
def extended_tiny(tiny_bundles: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a tiny bundle with as many positions as the bundle serves."""
    from hdexport.extend import ExtendOptions, extend

    bundle, path = tiny_bundles("bert"), tmp_path_factory.mktemp("extended") / "checkpoint"
    extend(ExtendOptions(model=bundle.checkpoint, output=path, max_len=bundle.manifest.max_len))
    return path


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_each_pooling_is_that_of_sentence_transformers(
    extended_tiny: Path, tiny_bundles: Callable[..., Any], pooling: str
) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    texts = ["", *(" ".join(f"w{(7 * length + n) % 90}" for n in range(length)) for length in (3, 40, 1, 17, 90, 350))]
    modules = [Transformer(str(extended_tiny)), Pooling(32, pooling_mode=pooling)]
    theirs = SentenceTransformer(modules=modules, device="cpu")
    path = tiny_bundles("bert").path
    with SentenceEncoder(path, pooling=pooling, max_seq_length="bundle") as ours:
        assert ours.max_seq_length == theirs.max_seq_length == 300
        assert_close(ours.encode(texts), theirs.encode(texts, batch_size=3), atol=POOLED_ATOL)
        # Truncated
        ours.max_seq_length = theirs.max_seq_length = 33
        expected = theirs.encode(texts, normalize_embeddings=True)
        assert_close(ours.encode(texts, normalize_embeddings=True), expected, atol=NORMALISED_ATOL)
    other = "mean" if pooling == "cls" else "cls"
    with SentenceEncoder(path, pooling=other, max_seq_length=33) as wrong, pytest.raises(AssertionError):
        assert_close(wrong.encode(texts, normalize_embeddings=True), expected, atol=100 * NORMALISED_ATOL)
