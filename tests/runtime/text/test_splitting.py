"""Long texts run in chunks: the library's own, each token answered once, and vectors pooled as by hand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import hdruntime
from fakes.recording_runner import RecordingRunner
from hdruntime.bundle.manifest import TensorSpec
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import InputError, NonFiniteOutputError
from hdruntime.session import Session
from hdruntime.text.encoding import Encoding
from hdruntime.text.splitting import SplitEncoding, SplitPooling, merged, pooled_embedding, split_encodings
from support.comparators import assert_close, named_case

CLS, SEP = 2, 3
WORDS = [f"w{index}" for index in range(200)]
SPECS = (
    TensorSpec(name="per_token", dtype="float32", shape=("batch", "tokens", 2)),
    TensorSpec(name="logits", dtype="float32", shape=("batch", 2)),
)


def _template(single: str, pair: str) -> processors.PostProcessor:
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)])


PROCESSORS = {
    "bert": processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS)),
    "roberta": processors.RobertaProcessing(("[SEP]", SEP), ("[CLS]", CLS)),
    "template": _template("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "at the end": _template("$A [SEP] [CLS]:2", "$A [SEP] $B:1 [SEP]:1 [CLS]:2"),
    "bytes": processors.Sequence([processors.ByteLevel(), _template("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")]),
    "none": processors.ByteLevel(),
}


def tokenizer(kind: str = "bert") -> Tokenizer:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = PROCESSORS[kind]
    return made


def split(
    words: int, *, max_len: int = 10, stride: int = 0, question: int | None = None, kind: str = "bert"
) -> SplitEncoding:
    """A text of so many words, or a pair with a question of so many."""
    text = " ".join(WORDS[:words])
    given = text if question is None else (" ".join(WORDS[100 : 100 + question]), text)
    (item,) = tokenizer(kind).encode_batch([given])
    whole = Encoding(item.ids, item.type_ids, item.offsets, item.sequence_ids)
    is_pair = question is not None
    (made,) = split_encodings([whole], max_len=max_len, stride=stride, is_pair=is_pair)
    return made


# Chunks


def test_pieces_are_those_of_the_tokenizers_library() -> None:
    sizes = [8, 9, 15, 16, 17, 24, 41]
    for kind, words, stride, question in itertools.product(PROCESSORS, sizes, [0, 1, 3], [None, 2]):
        library, text = tokenizer(kind), " ".join(WORDS[:words])
        library.enable_truncation(10, stride=stride, strategy="longest_first" if question is None else "only_second")
        first = library.encode(*([" ".join(WORDS[100 : 100 + question])] if question else []), text)
        found = [first, *first.overflowing]
        expected = [Encoding(item.ids, item.type_ids, item.offsets, item.sequence_ids) for item in found]
        with named_case(kind, words, stride, question):
            assert split(words, stride=stride, question=question, kind=kind).chunks == expected


def test_a_text_that_fits_is_its_own_chunk() -> None:
    for words in (0, 1, 8):
        made = split(words, stride=7)
        assert (made.chunks, made.boundaries) == ([made.whole], [0, words + 2])
    assert len(split(1, question=6, stride=5).chunks) == 1, "a pair that fits needs no room for the stride"


def test_every_chunk_begins_with_the_prompt() -> None:
    whole = split(20).whole
    whole.prompt_tokens = 4  # [CLS] and three words
    (made,) = split_encodings([whole], max_len=10, stride=1, is_pair=False)
    ids = whole.input_ids
    assert [chunk.input_ids for chunk in made.chunks] == [
        ids[:4] + ids[first : first + 5] + ids[-1:] for first in (4, 8, 12)
    ] + [ids[:4] + ids[16:]]
    assert all(chunk.prompt_tokens == 4 for chunk in made.chunks)
    with pytest.raises(InputError, match="cannot be split: the special tokens, the prompt and"):
        split_encodings([whole], max_len=5, stride=0, is_pair=False)


def context(split: SplitEncoding, chunk: int, token: int) -> float:
    """How many tokens of the text a token of it sees on the side where a chunk shows fewer; -1 if it is not there.

    Where the text itself ends nothing is missing.
    """
    own = [
        index for index, sequence in enumerate(split.whole.sequence_ids) if sequence == split.whole.sequence_ids[token]
    ]
    start = own[0] + chunk * split.step
    end = start + sum(sequence == split.whole.sequence_ids[token] for sequence in split.chunks[chunk].sequence_ids)
    if not start <= token < end:
        return -1
    before = np.inf if chunk == 0 else token - start
    behind = np.inf if chunk == len(split.chunks) - 1 else end - 1 - token
    return min(before, behind)


@pytest.mark.parametrize("question", [None, 2])
def test_every_token_comes_once_and_from_the_chunk_that_shows_most_around_it(question: int | None) -> None:
    for words, stride in itertools.product([9, 16, 17, 23, 24, 25, 60], [0, 1, 2, 3, 4, 7]):
        with named_case(words, stride):
            # Room for 8 tokens of the text in either case.
            made = split(words, stride=stride, max_len=10 if question is None else 13, question=question)
            assert made.boundaries[0] == 0
            assert made.boundaries[-1] == len(made.whole)
            assert len(made.boundaries) == len(made.chunks) + 1
            for chunk, (first, end) in enumerate(zip(made.boundaries, made.boundaries[1:], strict=False)):
                assert first < end
                for token in range(first, end):
                    local = token - chunk * made.step
                    for field in ("input_ids", "token_type_ids", "offsets", "sequence_ids"):
                        assert getattr(made.chunks[chunk], field)[local] == getattr(made.whole, field)[token]
                    if made.whole.sequence_ids[token] == (0 if question is None else 1):
                        best = max(context(made, other, token) for other in range(len(made.chunks)))
                        assert context(made, chunk, token) == best


WITHOUT_ROOM = [
    (
        20,
        None,
        -1,
        r"^The text cannot be split with a stride or overlap of -1 tokens; it must be 0 to 7\.",
    ),
    (2, None, 8, "with a stride or overlap of 8 tokens; it must be 0 to 7"),
    (20, 3, 4, r"stride or overlap of 4 tokens; it must be 0 to 3\.\nA chunk has 10 tokens; each chunk repeats 6"),
    (20, 7, 0, r"^The text cannot be split: the special tokens, .* no token of the 10 of a chunk\.\nShorten the"),
]


def test_a_stride_without_room_is_refused() -> None:
    for words, question, stride, message in WITHOUT_ROOM:
        with named_case(words, question, stride), pytest.raises(InputError, match=message):
            split(words, question=question, stride=stride)


# Outputs put together


def stitched_by_hand(made: SplitEncoding, outputs: Sequence[np.ndarray]) -> np.ndarray:
    """Token by token, from the first chunk that shows most around it; special tokens from the first or last chunk."""
    rows = []
    for token, sequence in enumerate(made.whole.sequence_ids):
        if sequence is not None:
            chunk = int(np.argmax([context(made, other, token) for other in range(len(made.chunks))]))
        else:
            chunk = 0 if token == 0 else len(made.chunks) - 1
        rows.append(outputs[chunk][token - chunk * made.step])
    return np.stack(rows)


def test_outputs_of_chunks_become_those_of_the_text() -> None:
    for stride, pooling in itertools.product([0, 2, 4], SplitPooling):
        with named_case(stride, pooling):
            made = split(41, stride=stride)
            random = np.random.default_rng(stride)
            outputs = [
                {
                    "per_token": random.standard_normal((len(chunk), 2)).astype(np.float32),
                    "logits": random.standard_normal(2).astype(np.float32),
                }
                for chunk in made.chunks
            ]
            whole = merged(made, outputs, specs=SPECS, pooling=pooling)
            per_token = stitched_by_hand(made, [output["per_token"] for output in outputs])
            np.testing.assert_array_equal(whole["per_token"], per_token)
            logits = np.stack([output["logits"] for output in outputs]).astype(np.float64)
            tokens = np.array([len(chunk) for chunk in made.chunks])
            by_hand = logits.max(0) if pooling is SplitPooling.MAX else tokens @ logits / tokens.sum()
            assert_close(whole["logits"], by_hand, atol=1e-7)
            assert whole["logits"].dtype == np.float32


def test_a_cut_beside_its_place_is_seen() -> None:
    made = split(41, stride=4)
    outputs = [{"per_token": np.random.default_rng(0).random((len(chunk), 2), np.float32)} for chunk in made.chunks]
    expected = stitched_by_hand(made, [output["per_token"] for output in outputs])
    for place in (1, 3):
        for shift in (-1, 1):
            boundaries = [boundary + shift * (index == place) for index, boundary in enumerate(made.boundaries)]
            wrong = dataclasses.replace(made, boundaries=boundaries)
            got = merged(wrong, outputs, specs=SPECS, pooling=SplitPooling.MEAN)["per_token"]
            assert got.shape == expected.shape
            assert not np.array_equal(got, expected)


# Vectors


def test_vectors_of_length_1_stay_so() -> None:
    made = split(20)
    vectors = np.random.default_rng(0).standard_normal((len(made.chunks), 5)).astype(np.float32)
    unit = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    for pooling in SplitPooling:
        pooled = pooled_embedding(made, list(unit), pooling)
        assert pooled.dtype == np.float32
        assert abs(np.linalg.norm(pooled) - 1) < 1e-6
        plain = merged(made, [{"logits": vector} for vector in unit], specs=SPECS, pooling=pooling)["logits"]
        assert np.linalg.norm(plain) < 0.95 or pooling is SplitPooling.MAX, "logits are no vectors"
        assert_close(pooled, plain / np.linalg.norm(plain), atol=1e-6)
        of_output = merged(made, [{"sentence_embedding": vector} for vector in unit], specs=SPECS, pooling=pooling)
        np.testing.assert_array_equal(of_output["sentence_embedding"], pooled)


def test_other_vectors_are_not_made_longer() -> None:
    made = split(20)
    vectors = [np.full(4, 0.5, np.float32)] * (len(made.chunks) - 1) + [np.full(4, 0.51, np.float32)]
    pooled = pooled_embedding(made, vectors, SplitPooling.MEAN)
    weights = [len(chunk) for chunk in made.chunks]
    assert_close(pooled, np.average(vectors, axis=0, weights=weights), atol=1e-7)


def test_vectors_that_cancel_out_give_zeros_rather_than_nan() -> None:
    made = split(16)
    assert len(made.chunks) == 2
    np.testing.assert_array_equal(
        pooled_embedding(made, [np.eye(4, dtype=np.float32)[0], -np.eye(4, dtype=np.float32)[0]], SplitPooling.MEAN),
        np.zeros(4, np.float32),
    )


# A session


WHOLE = "long documents are read whole . " * 9
TEXTS = ["long", WHOLE, "", "documents are read", WHOLE + "read", "whole " * 14]


@pytest.fixture
def session(request: pytest.FixtureRequest, new_bundle: Callable[..., Path]) -> Session:
    return hdruntime.load(new_bundle(task=getattr(request, "param", "feature-extraction"), cpu_graph=True))


@pytest.mark.parametrize(
    ("session", "pooling"),
    [("feature-extraction", "mean"), ("sentence-similarity", "max"), ("feature-extraction", SplitPooling.MAX)],
    indirect=["session"],
)
def test_split_vectors_are_those_of_the_chunks_run_by_themselves(session: Session, pooling: SplitPooling | str) -> None:
    for stride in [0, 1, 5, 13]:
        with named_case(stride):
            vectors = session.embed(TEXTS, overflow="split", stride=stride, split_pooling=pooling)
            assert vectors.dtype == np.float32
            for text, vector in zip(TEXTS, vectors, strict=True):
                (made,) = session.split([text], stride=stride)
                of_pieces = []
                for chunk in made.chunks:
                    outputs = session(input_ids=[chunk.input_ids])
                    of_pieces.append(
                        outputs["sentence_embedding"][0]
                        if len(outputs) > 1
                        else outputs["last_hidden_state"][0].mean(0)
                    )
                weights = [len(chunk) for chunk in made.chunks]
                by_hand = (
                    np.average(of_pieces, axis=0, weights=weights) if pooling == "mean" else np.max(of_pieces, axis=0)
                )
                assert_close(vector, by_hand, atol=1e-6)
            other = session.embed(
                TEXTS, overflow="split", stride=stride, split_pooling="max" if pooling == "mean" else "mean"
            )
            assert np.abs(other - vectors)[[1, 4]].max() > 1e-3, "another pooling would be seen"
            assert np.abs(session.embed(TEXTS, overflow="truncate") - vectors)[1].max() > 1e-3, (
                "so would a text cut off"
            )


def test_a_model_that_normalises_gives_vectors_of_length_1(new_bundle: Callable[..., Path]) -> None:
    class Normalising(RecordingRunner):
        def start(self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str]) -> Callable[[], dict]:
            vectors = inputs["input_ids"][:, 1:5] + np.ones((1, 4))
            unit = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
            return lambda: {"sentence_embedding": unit}

    session = Session(open_bundle(new_bundle(task="sentence-similarity")), Normalising())
    lengths = np.linalg.norm(session.embed([WHOLE, "long documents are"], overflow="split"), axis=1)
    assert_close(lengths, np.ones(2), atol=1e-6)


def test_nan_in_a_chunk_is_that_of_its_text(session: Session) -> None:
    with pytest.raises(NonFiniteOutputError, match=r"^texts\[2\]: "):
        session.embed(["long", WHOLE, WHOLE + "nan", WHOLE], overflow="split")
    with pytest.raises(NonFiniteOutputError, match=r"NaN or infinity\."):
        session.embed([WHOLE + "nan"], overflow="split")


OPTIONS_THAT_DO_NOT_FIT = [
    ({"overflow": "split", "stride": 14}, "with a stride or overlap of 14 tokens; it must be 0 to 13"),
    ({"overflow": "truncate", "stride": 1}, "stride is 1, but only overflow='split' has a stride"),
    ({"overflow": "split", "split_pooling": "cls"}, "split_pooling is 'cls'; it must be one of 'mean', 'max'"),
    ({"overflow": "drop"}, "overflow is 'drop'; it must be one of 'error', 'truncate', 'split'"),
]


def test_options_that_do_not_fit_are_refused(session: Session) -> None:
    for options, message in OPTIONS_THAT_DO_NOT_FIT:
        with named_case(message), pytest.raises(InputError, match=message):
            session.embed(TEXTS, **options)


def test_tokenize_says_what_splits(session: Session) -> None:
    with pytest.raises(
        InputError, match=r"cannot split\.\nUse session\.split\(texts, stride=\.\.\.\), or session\.embed"
    ):
        session.tokenize(TEXTS, overflow="split")
