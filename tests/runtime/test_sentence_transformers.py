"""Models that sentence-transformers saved: their bundles give its numbers, by default and with every argument.

The evaluators and searches of sentence-transformers, LangChain and batch jobs get the same numbers.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdruntime
from hdruntime import SentenceEncoder
from hdruntime.errors import InputError, MissingDependencyError
from hdruntime.langchain_embeddings import LangChainEmbeddings
from support.comparators import assert_close, named_case
from support.job_runs import read, run
from support.made_once import made_once
from support.sentence_bundles import with_settings_of
from support.tiny_models import change_json

sentence_transformers = pytest.importorskip("sentence_transformers")

ATOL = 1e-6
"""Measured: 2.4e-7."""

TEXTS = ["w7 w8 w9 w10", "w11 W12", "", "w5 " * 60, "W20 w21 unknown", "w9"]

PROMPTS = {"query": "w30 W31 ", "passage": "w32: "}

MODELS = ("prompted", "sentence-t5", "last token")


def _save_base(path: Path, model_type: str) -> None:
    from hdruntime.bundle.manifest import Task
    from support.tiny_models import save_tiny_model

    save_tiny_model(path, model_type, Task.FEATURE_EXTRACTION)


def _save(path: Path, name: str) -> None:
    """Save a tiny model of that name, as sentence-transformers does it."""
    import torch
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    base = path.with_name(f"{path.name} base")
    _save_base(base, "qwen3" if name == "last token" else "t5")
    if name == "late interaction":
        torch.manual_seed(3)
        of_tokens = {"module_input_name": "token_embeddings"}
        projection = Dense(32, 20, bias=False, activation_function=torch.nn.Identity(), **of_tokens)
        model = sentence_transformers.MultiVectorEncoder(
            modules=[Transformer(str(base), max_seq_length=24), projection, Normalize(**of_tokens)],
            prompts=PROMPTS,
        )
    elif name == "sentence-t5":
        torch.manual_seed(2)
        projection = Dense(32, 20, bias=False, activation_function=torch.nn.Identity())
        model = sentence_transformers.SentenceTransformer(
            modules=[Transformer(str(base), max_seq_length=24), Pooling(32, "mean"), projection, Normalize()]
        )
    else:
        # sentence-transformers pads on the left, and the bundle's session on the right.
        change_json(base / "tokenizer_config.json", padding_side="left")
        model = sentence_transformers.SentenceTransformer(
            modules=[
                Transformer(str(base), max_seq_length=24),
                Pooling(32, ("weightedmean", "lasttoken"), include_prompt=False),
                Normalize(),
            ],
            prompts=PROMPTS,
        )
        assert model.tokenizer.padding_side == "left"
    model.save_pretrained(str(path))


def _prompt(plain: Any, directory: Path) -> None:
    """Save a model with prompts and a shorter length; its bundle has the graph of the one without."""
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    model = sentence_transformers.SentenceTransformer(
        modules=[Transformer(str(plain.checkpoint), max_seq_length=24), Pooling(32, "mean"), Normalize()],
        prompts=PROMPTS,
        default_prompt_name="query",
    )
    model.save_pretrained(str(directory / "checkpoint"))
    with_settings_of(directory / "checkpoint", plain.path, directory / "bundle")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_bundles: Callable[..., Any]) -> Callable[[str], Path]:
    """Name of a model -> a folder with its ``checkpoint`` and its ``bundle``."""

    def save_and_build(name: str) -> Callable[[Path], None]:
        def make(directory: Path) -> None:
            from hdexport.build import BuildOptions, build

            if name == "prompted":
                _prompt(tiny_bundles("bert", "sentence-similarity"), directory)
                return
            _save(directory / "checkpoint", name)
            build(BuildOptions(model=directory / "checkpoint", output=directory / "bundle", max_len=100, verify=None))

        return make

    return lambda name: made_once(tmp_path_factory, f"sentence {name}", save_and_build(name))


Both = tuple[Any, SentenceEncoder]


@contextlib.contextmanager
def loaded(directory: Path) -> Iterator[Both]:
    """The model in sentence-transformers, and the bundle."""
    theirs = sentence_transformers.SentenceTransformer(str(directory / "checkpoint"), device="cpu")
    with SentenceEncoder(directory / "bundle") as ours:
        yield theirs, ours


@pytest.fixture
def prompted(saved: Callable[[str], Path]) -> Iterator[Both]:
    with loaded(saved("prompted")) as both:
        yield both


OPTIONS: list[dict[str, Any]] = [
    {},
    {"prompt_name": "passage"},
    {"prompt": "w40 w41 W42 "},
    {"prompt": "w40 " * 30},
    {"prompt": ""},
    {"normalize_embeddings": True},
    {"truncate_dim": 3},
    {"truncate_dim": 3, "normalize_embeddings": True, "prompt_name": "query"},
    {"batch_size": 2},
]


@pytest.mark.parametrize("name", MODELS)
def test_settings_and_vectors_are_those_of_sentence_transformers(saved: Callable[[str], Path], name: str) -> None:
    with loaded(saved(name)) as (theirs, ours):
        check_settings(theirs, ours)
        check_vectors(theirs, ours)


def check_settings(theirs: Any, ours: SentenceEncoder) -> None:
    for name in ("max_seq_length", "prompts", "default_prompt_name", "similarity_fn_name"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.get_embedding_dimension() == theirs.get_embedding_dimension()
    for text in TEXTS:
        assert ours.tokenizer.encode(text).ids == theirs.tokenizer(text)["input_ids"]


def check_vectors(theirs: Any, ours: SentenceEncoder) -> None:
    for options in OPTIONS:
        if options.get("prompt_name") == "passage" and "passage" not in theirs.prompts:
            options = {"prompt_name": "document"}
        assert_close(ours.encode(TEXTS, **options), theirs.encode(TEXTS, **options), atol=ATOL)
    assert_close(ours.encode_query(TEXTS), theirs.encode_query(TEXTS), atol=ATOL)
    assert_close(ours.encode_document(TEXTS), theirs.encode_document(TEXTS), atol=ATOL)
    with pytest.raises(AssertionError):
        assert_close(ours.encode(TEXTS, prompt="w40 "), theirs.encode(TEXTS, prompt="w41 "), atol=100 * ATOL)


def test_token_vectors_and_tensors_are_those_of_sentence_transformers(saved: Callable[[str], Path]) -> None:
    import torch

    with loaded(saved("last token")) as (theirs, ours):
        of_both = [each.encode(TEXTS, output_value="token_embeddings") for each in (theirs, ours)]
        for expected, found in zip(*of_both, strict=True):
            # Theirs have rows of 0 for padding on the left.
            assert_close(found, expected.numpy()[-len(found) :], atol=1e-5)
        assert isinstance(ours.encode("w5", output_value="token_embeddings", convert_to_tensor=True), torch.Tensor)
        for options in ({"convert_to_tensor": True}, {"convert_to_numpy": False}):
            expected, found = (each.encode(TEXTS, **options) for each in (theirs, ours))
            assert type(found) is type(expected)
            torch.testing.assert_close(found, expected, atol=ATOL, rtol=0)
        assert ours.encode("w5", convert_to_numpy=False).shape == theirs.encode("w5", convert_to_numpy=False).shape


def test_vectors_of_late_interaction_are_those_of_each_token(saved: Callable[[str], Path]) -> None:
    """As XTR makes them: projected, of length 1, and 0 for padding."""
    directory = saved("late interaction")
    theirs = sentence_transformers.MultiVectorEncoder(str(directory / "checkpoint"), device="cpu")
    with SentenceEncoder(directory / "bundle") as ours:
        for prompt in (None, "query"):
            found = ours.encode(TEXTS, prompt_name=prompt, output_value="token_embeddings")
            expected = theirs.encode(TEXTS, prompt_name=prompt, convert_to_numpy=True)
            for one, other in zip(found, expected, strict=True):
                assert one.shape[1] == 20
                assert_close(one, other, atol=ATOL)
    with hdruntime.load(directory / "bundle", backend="onnxruntime") as session:
        mask = np.array([[1, 1, 1, 0, 0]])
        vectors = session(input_ids=np.array([[5, 6, 7, 1, 1]]), attention_mask=mask)["last_hidden_state"]
    assert_close(np.linalg.norm(vectors, axis=2), mask, atol=ATOL)


def test_similarities_are_those_of_sentence_transformers(prompted: Both) -> None:
    members = list(sentence_transformers.SimilarityFunction)[:4]
    for function in ["cosine", "dot", "euclidean", "manhattan", *members]:
        with named_case(function):
            import torch

            theirs, ours = prompted
            theirs.similarity_fn_name = ours.similarity_fn_name = function
            assert ours.similarity_fn_name == theirs.similarity_fn_name
            first = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
            second = np.concatenate([first[::-1] + 1, np.zeros((1, 6), np.float32)])
            pairs: list[tuple[Any, Any]] = [
                (first, second),
                (first[0], second),
                (torch.from_numpy(first), second),
                (list(torch.from_numpy(first)), torch.from_numpy(second)),
                (torch.from_numpy(first).bfloat16(), torch.from_numpy(second).bfloat16()),
            ]
            for one, other in pairs:
                found = ours.similarity(one, other)
                is_tensor = not isinstance(one, np.ndarray)
                assert isinstance(found, torch.Tensor if is_tensor else np.ndarray)
                assert_close(np.asarray(found), theirs.similarity(one, other).numpy(), atol=1e-5)
            for one, other in ((first, second[:4]), (first[0], second[1]), (torch.from_numpy(first), second[:4])):
                expected = theirs.similarity_pairwise(one, other).numpy()
                assert_close(np.asarray(ours.similarity_pairwise(one, other)), expected, atol=1e-5)
            ours.similarity_fn_name = "maxsim"
            with pytest.raises(InputError, match="similarity_fn_name is 'maxsim'; it must be one of 'cosine', 'dot'"):
                ours.similarity(first, second)


def test_names_are_taken_from_enumerations_of_other_libraries(prompted: Both) -> None:
    class Name(Enum):
        UBINARY = "ubinary"
        QUERY = "query"
        TOKENS = "token_embeddings"
        MEAN = "mean"

    _, ours = prompted
    by_name = ours.encode(TEXTS, prompt_name="query", precision="ubinary")
    np.testing.assert_array_equal(ours.encode(TEXTS, prompt_name=Name.QUERY, precision=Name.UBINARY), by_name)  # type: ignore[arg-type]
    assert ours.encode("w5", output_value=Name.TOKENS).ndim == 2  # type: ignore[arg-type]
    with pytest.raises(InputError, match="pooling is 'mean', but this bundle pools as its model does"):
        SentenceEncoder(ours._path, pooling=Name.MEAN)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"precision is <Name\.MEAN: 'mean'>; it must be one of 'float32'"):
        ours.encode(TEXTS, precision=Name.MEAN)  # type: ignore[arg-type]


def test_arguments_are_taken_by_their_places_and_by_both_names_of_texts(saved: Callable[[str], Path]) -> None:
    with SentenceEncoder(saved("prompted") / "bundle") as encoder:
        for encode in (encoder.encode, encoder.encode_query, encoder.encode_document):
            by_place = encode(
                TEXTS, "query", None, 3, False, "sentence_embedding", "float32", True, False, "cpu", True, 4
            )
            assert by_place.shape == (len(TEXTS), 4)
            for name in ("sentences", "inputs"):
                options = {"prompt_name": "query", "normalize_embeddings": True, "truncate_dim": 4}
                assert (encode(**{name: TEXTS}, **options) == by_place).all()


def test_evaluators_and_search_run_and_find_the_same(prompted: Both) -> None:
    from sentence_transformers.sentence_transformer.evaluation import (
        EmbeddingSimilarityEvaluator,
        InformationRetrievalEvaluator,
    )
    from sentence_transformers.util import semantic_search

    words = [f"w{index} w{index * 7 % 100} w{index * 3 % 90}" for index in range(12)]
    scores = list(np.linspace(0, 1, 11))
    documents = {str(index): text for index, text in enumerate(words)}
    queries = {f"q{index}": f"w{index} w{index * 7 % 100}" for index in range(4)}
    evaluators = [
        EmbeddingSimilarityEvaluator(words[1:], words[:-1], scores, show_progress_bar=False),
        EmbeddingSimilarityEvaluator(words[1:], words[:-1], scores, show_progress_bar=False, precision="uint8"),
        EmbeddingSimilarityEvaluator(words[1:], words[:-1], scores, show_progress_bar=False, truncate_dim=5),
        InformationRetrievalEvaluator(
            queries, documents, {f"q{index}": {str(index)} for index in range(4)}, show_progress_bar=False
        ),
    ]
    for evaluator in evaluators:
        expected, found = (evaluator(each) for each in prompted)
        assert found == pytest.approx(expected, abs=0.02 if getattr(evaluator, "precision", None) else 1e-4)
    expected, found = (
        semantic_search(each.encode_query(list(queries.values())), each.encode_document(words), top_k=3)
        for each in prompted
    )
    assert [[hit["corpus_id"] for hit in hits] for hits in found] == [
        [hit["corpus_id"] for hit in hits] for hits in expected
    ]


def test_langchain_gets_lists_with_the_prompts_of_queries_and_documents(saved: Callable[[str], Path]) -> None:
    directory = saved("prompted")
    theirs = sentence_transformers.SentenceTransformer(str(directory / "checkpoint"), device="cpu")
    with SentenceEncoder(directory / "bundle") as encoder:
        embeddings = LangChainEmbeddings(encoder, truncate_dim=4)
        documents, query = embeddings.embed_documents(TEXTS), embeddings.embed_query(TEXTS[0])
    assert {type(documents[0]), type(query)} == {list}
    assert {type(documents[0][0]), type(query[0])} == {float}
    assert_close(np.array(documents), theirs.encode_document(TEXTS, truncate_dim=4), atol=ATOL)
    assert_close(np.array(query), theirs.encode_query(TEXTS[0], truncate_dim=4), atol=ATOL)


def test_numpy_results_need_no_pytorch(saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with SentenceEncoder(saved("last token") / "bundle") as encoder:
        monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises
        vectors = encoder.encode_query(["w5", "w6"], normalize_embeddings=True, precision="int8")
        assert (vectors.shape, encoder.similarity(vectors, vectors).shape) == ((2, 64), (2, 2))
        with pytest.raises(MissingDependencyError, match="pip install"):
            encoder.encode("w5", convert_to_tensor=True)


# Jobs


def rows(path: Path, columns: dict[str, list[Any]]) -> Path:
    values = zip(*columns.values(), strict=True)
    path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in values))
    return path


def test_a_job_puts_prompts_before_texts(saved: Callable[[str], Path], tmp_path: Path) -> None:
    directory = saved("last token")
    theirs = sentence_transformers.SentenceTransformer(str(directory / "checkpoint"), device="cpu")
    theirs.max_seq_length = 64
    texts = [text for text in TEXTS if len(text) < 100]
    inputs = rows(tmp_path / "in.jsonl", {"text": texts})
    for number, options in enumerate(({}, {"prompt_name": "passage"}, {"prompt": "w40 "}, {"prompt": ""})):
        run(directory / "bundle", inputs, tmp_path / f"{number}.jsonl", **options)
        found = np.array([row["embedding"] for row in read(tmp_path / f"{number}.jsonl")])
        assert_close(found, theirs.encode(texts, **options), atol=ATOL)
    with pytest.raises(InputError, match="prompt_name is 'title'; it must be one of 'query', 'document', 'passage'"):
        run(directory / "bundle", inputs, tmp_path / "other.jsonl", prompt_name="title")
    with pytest.raises(InputError, match="prompt and prompt_name both define"):
        run(directory / "bundle", inputs, tmp_path / "other.jsonl", prompt_name="query", prompt="")
