"""Every setting that sentence-transformers saves with a model: its bundle gives the same vectors, or it is refused."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import normalizers
from transformers import AutoTokenizer

from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.tokenizer_files import write_tokenizer
from hdruntime import SentenceEncoder
from hdruntime.bundle.manifest import Task
from hdruntime.errors import InputError, ModelError
from hdruntime.text.encoding import Overflow
from hdruntime.text.tokenization import TextTokenizer
from support.comparators import assert_close
from support.grids import nightly_unless
from support.made_once import made_once
from support.tiny_models import VOCAB_SIZE, change_json, save_tiny_model

sentence_transformers = pytest.importorskip("sentence_transformers")

from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer  # noqa: E402
from sentence_transformers.sentence_transformer.modules import (  # noqa: E402
    CNN,
    LSTM,
    Pooling,
    StaticEmbedding,
)

SHARE = 1e-6
"""Of the largest number, by which vectors may differ. Measured: 4.2e-7."""

WIDTH = 32
PROMPTS = {"query": "w30 W31 ", "passage": "w32 w33 w34 ", "title": None, "joined": "w"}
TEXTS = ["w7 w8 w9 w10", "w11 W12", "", "w5 " * 60, "W20 w21 unknown", "9", "w1" + " w2" * 9]
POOLINGS = tuple(Pooling.POOLING_MODES)

OPTIONS: list[dict[str, Any]] = [
    {},
    *({"prompt_name": name} for name in (*PROMPTS, "document")),
    {"prompt": ""},
    {"prompt": "w40 " * 30},
    {"truncate_dim": 7, "normalize_embeddings": True},
    {"batch_size": 1},
]


def _pooled(encoder: Transformer) -> Any:
    """All poolings, of the prompt's tokens, too; a default prompt, and a length that was set after loading."""
    model = sentence_transformers.SentenceTransformer(
        modules=[encoder, Pooling(WIDTH, POOLINGS)],
        prompts=PROMPTS,
        default_prompt_name="passage",
        similarity_fn_name="dot",
    )
    model.max_seq_length = 21
    return model


def _pooled_without_prompt(encoder: Transformer) -> Any:
    return sentence_transformers.SentenceTransformer(
        modules=[encoder, Pooling(WIDTH, POOLINGS, include_prompt=False)],
        prompts=PROMPTS,
        similarity_fn_name="manhattan",
        truncate_dim=150,
    )


def _layers(encoder: Transformer) -> Any:
    """Layers in another order than usual, with each activation function; padding is on the left."""
    encoder.tokenizer.padding_side = "left"
    functions = (torch.nn.GELU(), torch.nn.ReLU(), torch.nn.Tanh(), None)
    widths = (2 * WIDTH, 24, 20, 28, 12)
    layers = [
        Dense(one, other, bias=other != 20, activation_function=function)
        for one, other, function in zip(widths[:-1], widths[1:], functions, strict=True)
    ]
    return sentence_transformers.SentenceTransformer(
        modules=[encoder, Pooling(WIDTH, ("lasttoken", "mean")), Normalize(), *layers, Normalize()],
        prompts=PROMPTS,
        default_prompt_name="title",
        similarity_fn_name="euclidean",
    )


def _other_modules(encoder: Transformer) -> Any:
    """Modules that change the tokens before they are pooled, and a function that is not among the usual ones."""
    return sentence_transformers.SentenceTransformer(
        modules=[
            encoder,
            CNN(WIDTH, 16),
            Pooling(48, ("max", "mean")),
            Dense(96, 8, activation_function=torch.nn.Softplus()),
        ],
        prompts=PROMPTS,
    )


MODELS: dict[str, tuple[Callable[[Transformer], Any], dict[str, Any]]] = {
    "all poolings": (_pooled, {}),
    "all poolings without the prompt": (_pooled_without_prompt, {"do_lower_case": True, "max_seq_length": 30}),
    "layers": (_layers, {"max_seq_length": 5000}),
    "other modules": (_other_modules, {}),
}
"""Name -> what makes the model, and options of its Transformer."""


def assert_same(found: np.ndarray, expected: Any, *, share: float = SHARE) -> None:
    expected = np.asarray(expected)
    assert_close(found, expected, atol=share * float(np.abs(expected).max()))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT. Not to be changed: copy it."""
    return made_once(
        tmp_path_factory, "base of sentence models", lambda path: save_tiny_model(path, "bert", Task.FEATURE_EXTRACTION)
    )


# The poolings of a prompt's tokens, by themselves: tests/exporter/checkpoint/test_sentence_pooling.py
@pytest.mark.parametrize("name", [nightly_unless(name not in ("all poolings", "layers"), name) for name in MODELS])
def test_vectors_are_those_of_sentence_transformers(name: str, base: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    make, options = MODELS[name]
    make(Transformer(str(base), **options)).save_pretrained(str(tmp_path / "checkpoint"))
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "checkpoint"), device="cpu")
    build(BuildOptions(model=tmp_path / "checkpoint", output=tmp_path / "bundle", max_len=64, verify=None))
    with SentenceEncoder(tmp_path / "bundle") as ours:
        for setting in ("max_seq_length", "prompts", "default_prompt_name", "similarity_fn_name"):
            assert getattr(ours, setting) == getattr(theirs, setting), setting
        assert ours.get_embedding_dimension() == theirs.get_embedding_dimension()
        # The library's convolutions see the padding of a batch.
        alone: dict[str, Any] = {"batch_size": 1} if name == "other modules" else {}
        for given in OPTIONS:
            for method in ("encode", "encode_query", "encode_document"):
                found, expected = (getattr(each, method)(TEXTS, **alone | given) for each in (ours, theirs))
                assert_same(found, expected)
        assert_same(ours.similarity(found, found[1:]), theirs.similarity(expected, expected[1:]), share=1e-5)
        # What would be noticed: another text, another prompt, another type.
        for wrong in (ours.encode(TEXTS[::-1]), ours.encode(TEXTS, prompt="w41 "), ours.encode([*TEXTS[:-1], "w1"])):
            with pytest.raises(AssertionError):
                assert_same(wrong, theirs.encode(TEXTS, **alone), share=100 * SHARE)
        whole = ours.encode(TEXTS)
        assert (ours.encode(TEXTS, precision="float16") == whole.astype(np.float16)).all()
        for precision in ("int8", "uint8", "binary", "ubinary"):
            found, expected = (each.encode(TEXTS, precision=precision, **alone) for each in (ours, theirs))
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            # Vectors that differ in the last digit may be on either side of a step.
            assert (found == expected).mean() > 0.95
        _check_prompts_set_by_the_caller(ours, theirs, **alone)


def _check_prompts_set_by_the_caller(ours: SentenceEncoder, theirs: Any, **options: Any) -> None:
    """Without a prompt of its name, each method has a fallback of its own."""
    for prompts, default in (({"corpus": "w50 ", "passage": "w51 "}, "corpus"), ({"corpus": "w50 "}, None), ({}, None)):
        for each in (ours, theirs):
            each.prompts, each.default_prompt_name = prompts, default
        for method in ("encode", "encode_query", "encode_document"):
            assert_same(getattr(ours, method)(TEXTS), getattr(theirs, method)(TEXTS, **options))
    with pytest.raises(InputError, match="prompt_name is 'query'"):
        ours.encode(TEXTS, prompt_name="query")


NORMALIZERS: dict[str, Any] = {
    "no normalizer": None,
    "uncased normalizer": normalizers.BertNormalizer(lowercase=True),
    "chain": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    "chain in a chain": normalizers.Sequence([normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])]),
}


def _with_own_class(path: Path, *, do_lower_case: bool) -> None:
    """A cased or an uncased tokenizer as BERT was published with: a list of words, and an option."""
    vocabulary = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    (path / "tokenizer.json").unlink()
    (path / "vocab.txt").write_text("".join(f"{word}\n" for word in vocabulary))
    change_json(path / "tokenizer_config.json", tokenizer_class="BertTokenizer", do_lower_case=do_lower_case)


def _with_normalizer(path: Path, normalizer: Any) -> None:
    """A fast tokenizer that has cases or not, with an added token of either case."""
    own = AutoTokenizer.from_pretrained(path)
    own.backend_tokenizer.normalizer = normalizer
    own.add_tokens(["w9W", "Ww"])
    own.save_pretrained(path)


TOKENIZERS: dict[str, Callable[[Path], None]] = {
    **{name: functools.partial(_with_normalizer, normalizer=each) for name, each in NORMALIZERS.items()},
    "cased": functools.partial(_with_own_class, do_lower_case=False),
    "uncased": functools.partial(_with_own_class, do_lower_case=True),
}


LOWERING = ("uncased", "uncased normalizer", "chain in a chain")


@pytest.fixture(scope="module")
def two_more_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of one layer with room for two added tokens. Not to be changed: copy it."""
    path = tmp_path_factory.mktemp("words") / "checkpoint"
    save_tiny_model(path, "bert", Task.FEATURE_EXTRACTION, vocab_size=VOCAB_SIZE + 2, num_hidden_layers=1)
    return path


@pytest.mark.parametrize("name", TOKENIZERS)
def test_cases_are_lowered_as_sentence_transformers_does(name: str, two_more_words: Path, tmp_path: Path) -> None:
    """``do_lower_case`` of the Transformer, and of a tokenizer that has cases or not."""
    checkpoint = Path(shutil.copytree(two_more_words, tmp_path / "checkpoint"))
    TOKENIZERS[name](checkpoint)
    texts = ["w7 W7 Ẃ7 ẃ7", "W9W w9W Ww WW", "[SEP] [sep] İw1", ""]
    expected = {}
    for lowers in (False, True):
        modules = [Transformer(str(checkpoint), do_lower_case=lowers), Pooling(WIDTH)]
        expected[lowers] = sentence_transformers.SentenceTransformer(modules=modules).tokenizer(texts)["input_ids"]
    (checkpoint / "modules.json").write_text('[{"type": "sentence_transformers.models.Transformer", "path": ""}]')
    for lowers in (False, True):
        change_json(checkpoint / "sentence_bert_config.json", do_lower_case=lowers)
        write_tokenizer(find_checkpoint(checkpoint), tmp_path)
        encodings = TextTokenizer(tmp_path / "tokenizer.json", max_len=64).encode(texts, overflow=Overflow.ERROR)
        assert [encoding.input_ids for encoding in encodings] == expected[lowers], lowers
        are_equal = encodings[0].input_ids[1] == encodings[0].input_ids[2]
        assert are_equal == (lowers or name in LOWERING)


def _router(encoder: Transformer, after: Sequence[Any]) -> list[Any]:
    """Texts of the two kinds go through different layers."""
    layers = [Dense(WIDTH, 8)], [Dense(WIDTH, 8)]
    if after:
        return [encoder, *after, Router.for_query_document(*layers, default_route="document")]
    routes = [[encoder, Pooling(WIDTH, mode)] for mode in ("mean", "cls")]
    return [Router.for_query_document(*routes, default_route="document")]


PART = "Build the token embeddings of a part: .*/checkpoint/query_0_Transformer$"
MEAN = Pooling(WIDTH, "mean")

REFUSED: dict[str, tuple[Callable[[Transformer], list[Any]], str]] = {
    "Router first": (lambda encoder: _router(encoder, []), rf"begins with 'Router', and not with a Transf.*\n{PART}"),
    "Router": (
        lambda encoder: _router(encoder, [MEAN]),
        r"module Router .* each call \(modality, task\)",
    ),
    "LSTM": (lambda encoder: [encoder, LSTM(WIDTH, 16), Pooling(32)], "module LSTM .* it needs 'sentence_lengths'"),
    "StaticEmbedding": (
        lambda encoder: [StaticEmbedding(encoder.tokenizer.backend_tokenizer, embedding_dim=16)],
        r"begins with 'StaticEmbedding'.*\nChoose a model that begins with a Transformer\.",
    ),
}
"""Name -> the modules, given a Transformer, and the message of the build."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_bundle_cannot_do_is_refused_by_name(name: str, base: Path, tmp_path: Path) -> None:
    modules, message = REFUSED[name]
    model = sentence_transformers.SentenceTransformer(modules=modules(Transformer(str(base))))
    model.save_pretrained(str(tmp_path / "checkpoint"), create_model_card=False)
    with pytest.raises(ModelError, match=message):
        build(BuildOptions(model=tmp_path / "checkpoint", output=tmp_path / "bundle", max_len=64, verify=None))
    assert not (tmp_path / "bundle").exists()
