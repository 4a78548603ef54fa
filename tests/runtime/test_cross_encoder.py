"""Rerankers and classifiers of pairs: the numbers of sentence-transformers, and long documents in chunks.

An encoder, a session and a job give the same numbers.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdruntime
from hdruntime import CrossEncoder
from hdruntime.errors import InputError
from hdruntime.jobs.rows import Columns
from hdruntime.text.encoding import Overflow
from support.comparators import assert_close, named_case
from support.job_runs import read, run
from support.made_once import made_once
from support.sentence_bundles import with_settings_of

sentence_transformers = pytest.importorskip("sentence_transformers")

ATOL = 1e-5
"""Measured: 2e-7."""

POSITIONS, MAX_LEN = 64, 90

QUERY = "How many people live in Berlin?"
LONG = "The Spree flows through Berlin, past museums, and 3.8 million people live there. " * 12
DOCUMENTS = [
    "Berlin had a population of 3,520,031 in 2019.",
    "",
    "Museums. " * 12,
    LONG,
    "Nobody reads this twice.",
    LONG,
]
PAIRS = [*((QUERY, document) for document in DOCUMENTS), (LONG, DOCUMENTS[0]), (LONG, LONG + "!"), ("", "")]


def _save(path: Path, labels: int) -> None:
    """Save a small model with a random head and the sample model's tokenizer, as sentence-transformers does it."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    from hdexport.checkpoint import default_model

    torch.manual_seed(labels)
    tokenizer = AutoTokenizer.from_pretrained(str(default_model()[0]), model_max_length=POSITIONS)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
        num_labels=labels,
        initializer_range=0.4,
    )
    base = path.with_name("base")
    BertForSequenceClassification(config).save_pretrained(base)
    tokenizer.save_pretrained(base)
    options = {
        "prompts": {"query": "Find the answer: "},
        "activation_fn": None if labels == 1 else torch.nn.Softmax(-1),
    }
    sentence_transformers.CrossEncoder(str(base), device="cpu", **options).save_pretrained(str(path))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Number of labels -> a folder with a ``checkpoint``, its ``base`` as transformers saved it, and its ``bundle``."""

    def save_and_build(labels: int) -> Callable[[Path], None]:
        def make(directory: Path) -> None:
            from hdexport.build import BuildOptions, build

            _save(directory / "checkpoint", labels)
            build(
                BuildOptions(model=directory / "checkpoint", output=directory / "bundle", max_len=MAX_LEN, verify=None)
            )

        return make

    return lambda labels: made_once(tmp_path_factory, f"pairs {labels}", save_and_build(labels))


@pytest.fixture(params=[1, 3])
def both(request: pytest.FixtureRequest, saved: Callable[[int], Path]) -> Iterator[tuple[Any, CrossEncoder]]:
    """The model in sentence-transformers, and the bundle."""
    directory = saved(request.param)
    theirs = sentence_transformers.CrossEncoder(str(directory / "checkpoint"), device="cpu")
    with CrossEncoder(directory / "bundle", backend="onnxruntime") as ours:
        yield theirs, ours


@pytest.fixture(scope="module")
def reranker(saved: Callable[[int], Path]) -> Iterator[CrossEncoder]:
    """Of one label; a test does not change its settings."""
    with CrossEncoder(saved(1) / "bundle", backend="onnxruntime") as encoder:
        yield encoder


def scores_of_chunks(checkpoint: Path, documents: list[str], *, stride: int, pool: Callable[..., Any]) -> np.ndarray:
    """float32 [documents]: transformers' tokenizer cuts, its model runs, and a sigmoid follows what is pooled."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint))
    model = AutoModelForSequenceClassification.from_pretrained(str(checkpoint)).eval()
    found = []
    for document in documents:
        chunks = tokenizer(
            [QUERY], [document], truncation="only_second", stride=stride, max_length=POSITIONS, padding=True,
            return_overflowing_tokens=True, return_tensors="pt",
        )  # fmt: skip
        del chunks["overflow_to_sample_mapping"]
        with torch.inference_mode():
            logits = model(**chunks).logits[:, 0]
        found.append(torch.sigmoid(pool(logits, chunks["attention_mask"].sum(1))).item())
    return np.array(found, np.float32)


@pytest.mark.pinned  # closer than other versions are to each other
def test_scores_are_those_of_sentence_transformers(both: tuple[Any, CrossEncoder]) -> None:
    import torch

    theirs, ours = both
    assert (ours.num_labels, ours.max_seq_length) == (theirs.num_labels, theirs.max_seq_length)
    options: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"prompt_name": "query"}, {}),
        ({"prompt": "find "}, {"batch_size": 2}),
        ({"activation_fn": torch.nn.Softmax(dim=-1)}, {"activation_fn": "softmax"}),
        ({"activation_fn": torch.nn.Tanh()}, {}),
        ({"apply_softmax": True}, {}),
    ]
    for of_both, of_ours in options:
        expected, found = theirs.predict(PAIRS, **of_both), ours.predict(PAIRS, **{**of_both, **of_ours})
        assert found.dtype == expected.dtype
        assert_close(found, expected, atol=ATOL)
    for pairs in (PAIRS[0], list(PAIRS[0]), PAIRS[:1], [], np.array(PAIRS[:3])):
        expected, found = theirs.predict(pairs), ours.predict(pairs)
        assert np.shape(found) == np.shape(expected)
        if np.size(expected):
            assert_close(np.asarray(found), np.asarray(expected), atol=ATOL)
    for kinds in ({"convert_to_tensor": True}, {"convert_to_numpy": False}):
        expected, found = theirs.predict(PAIRS, **kinds), ours.predict(PAIRS, **kinds)
        assert type(found) is type(expected)
        torch.testing.assert_close(found, expected, atol=ATOL, rtol=0)
    with pytest.raises(AssertionError):
        assert_close(ours.predict(PAIRS), theirs.predict([pair[::-1] for pair in PAIRS]), atol=100 * ATOL)


def test_documents_are_ranked_as_sentence_transformers_ranks_them(
    saved: Callable[[int], Path], reranker: CrossEncoder
) -> None:
    theirs = sentence_transformers.CrossEncoder(str(saved(1) / "checkpoint"), device="cpu")
    for options in ({}, {"top_k": 2, "return_documents": True}, {"top_k": 0}, {"prompt_name": "query", "top_k": 90}):
        expected, found = (each.rank(QUERY, DOCUMENTS, **options) for each in (theirs, reranker))
        assert [list(result) for result in found] == [list(result) for result in expected]
        for one, other in zip(found, expected, strict=True):
            assert type(one["score"]) is float
            assert one == {**other, "score": pytest.approx(other["score"], abs=ATOL)}
    # The documents that are alike are in their order.
    places = [result["corpus_id"] for result in reranker.rank(QUERY, DOCUMENTS)]
    assert places.index(3) + 1 == places.index(5)


def test_arguments_have_the_places_and_names_of_sentence_transformers() -> None:
    for name, count in (("predict", 13), ("rank", 13)):
        theirs = list(inspect.signature(getattr(sentence_transformers.CrossEncoder, name)).parameters)
        ours = inspect.signature(getattr(CrossEncoder, name)).parameters
        assert list(ours)[:count] == theirs[:count]
        assert {ours[each].kind for each in list(ours)[count:]} == {inspect.Parameter.KEYWORD_ONLY}


def test_a_long_documents_score_is_pooled_over_its_chunks(saved: Callable[[int], Path], reranker: CrossEncoder) -> None:
    stride = 7
    by_max = scores_of_chunks(saved(1) / "checkpoint", DOCUMENTS, stride=stride, pool=lambda logits, _: logits.max())
    by_mean = scores_of_chunks(
        saved(1) / "checkpoint", DOCUMENTS, stride=stride, pool=lambda logits, n: (logits * n).sum() / n.sum()
    )
    assert not np.allclose(by_max, by_mean, atol=100 * ATOL)
    pairs = [(QUERY, document) for document in DOCUMENTS]
    assert_close(reranker.predict(pairs, overflow="split", stride=stride), by_max, atol=ATOL)
    found = reranker.predict(pairs, overflow="split", stride=stride, split_pooling="mean")
    assert_close(found, by_mean, atol=ATOL)
    ranked = reranker.rank(QUERY, DOCUMENTS, overflow="split", stride=stride)
    assert [result["corpus_id"] for result in ranked] == np.argsort(-by_max, kind="stable").tolist()
    assert_close(np.array([result["score"] for result in ranked]), -np.sort(-by_max), atol=ATOL)


@pytest.mark.parametrize("length", [None, "bundle", 70])
def test_session_and_job_rank_as_the_encoder_does_at_every_length(
    length: Any, saved: Callable[[int], Path], tmp_path: Path
) -> None:
    bundle = saved(1) / "bundle"
    inputs = tmp_path / "pairs.jsonl"
    inputs.write_text("".join(json.dumps({"query": QUERY, "document": document}) + "\n" for document in DOCUMENTS))
    pairs, columns = [(QUERY, document) for document in DOCUMENTS], Columns(text="query", text_pair="document")
    with (
        CrossEncoder(bundle, max_length=length, backend="onnxruntime") as encoder,
        hdruntime.load(bundle, "onnxruntime", max_seq_length=length) as session,
    ):
        expected_length = {None: POSITIONS, "bundle": MAX_LEN}.get(length, length)
        assert encoder.max_seq_length == session.max_seq_length == expected_length
        for overflow in ("truncate", "split"):
            expected = encoder.predict(pairs, overflow=overflow)
            ranked = session.rank(QUERY, DOCUMENTS, overflow=overflow, return_documents=True)
            assert [result["text"] for result in ranked] == [DOCUMENTS[int(each["corpus_id"])] for each in ranked]
            assert_close(np.array([each["score"] for each in ranked]), -np.sort(-expected), atol=1e-6)
            options = {"overflow": Overflow(overflow), "max_seq_length": length}
            run(bundle, inputs, tmp_path / f"{overflow}.jsonl", columns=columns, **options)
            rows = read(tmp_path / f"{overflow}.jsonl")
            assert_close(np.array([row["score"] for row in rows]), expected, atol=1e-6)
        with pytest.raises(InputError, match=r"documents\[3\]: The text has \d+ tokens; (this|max_seq)"):
            session.rank(QUERY, DOCUMENTS)


def test_a_job_scores_pairs_as_sentence_transformers_does(saved: Callable[[int], Path], tmp_path: Path) -> None:
    bundle = saved(3) / "bundle"
    theirs = sentence_transformers.CrossEncoder(str(saved(3) / "checkpoint"), device="cpu")
    pairs = [pair for pair in PAIRS if LONG not in pair and LONG + "!" not in pair]
    inputs = tmp_path / "pairs.jsonl"
    inputs.write_text("".join(json.dumps({"query": one, "document": other}) + "\n" for one, other in pairs))
    columns = Columns(text="query", text_pair="document")
    for number, options in enumerate(({}, {"prompt_name": "query"}, {"prompt": "find "})):
        run(bundle, inputs, tmp_path / f"{number}.jsonl", columns=columns, **options)
        found = [list(row["scores"].values()) for row in read(tmp_path / f"{number}.jsonl")]
        assert_close(np.array(found), theirs.predict(pairs, **options).reshape(-1, 3), atol=ATOL)
    with pytest.raises(InputError, match=r"a row needs two texts, such as a query and its document\.\n.*query"):
        run(bundle, inputs, tmp_path / "other.jsonl", columns=Columns(text="query"))
    inputs.write_text(json.dumps({"query": "a", "document": None}) + "\n")
    done = run(bundle, inputs, tmp_path / "missing.jsonl", columns=columns)
    assert (done.failed_rows, dict(done.errors)) == (1, {"column": 1})


WHAT_CANNOT_BE_SCORED = [
    ("one text", {}, r"inputs is one string; it must be a list of pairs: \[\(query, document\)\]"),
    ([("a", "b"), ("a",)], {}, r"inputs\[1\] is \('a',\); it must be a pair of strings"),
    ([("a", "b"), ("a", 5)], {}, r"inputs\[1\] has a text of type int; it must be a string"),
    ([("a", "b"), ("a " * 70, "b")], {"overflow": "split"}, r"inputs\[1\]: The text cannot be split"),
    ([("a", "b")], {"overflow": "recur"}, "This bundle has no recurrent states"),
    ([("a", "b")], {"activation_fn": "relu"}, "activation_fn is 'relu'; it must be one of 'softmax', 'sigmoid'"),
    ([("a", "b")], {"activation_fn": 5}, "activation_fn is of type int; it must be"),
    ([("a", "b")], {"device": "cuda"}, r"was loaded on cpu .*\n.*CrossEncoder\(bundle, device='cuda'\)"),
]


def test_what_cannot_be_scored_is_refused(reranker: CrossEncoder) -> None:
    for inputs, options, message in WHAT_CANNOT_BE_SCORED:
        with named_case(message), pytest.raises(InputError, match=message):
            reranker.predict(inputs, **options)


def test_what_cannot_be_ranked_is_refused(
    saved: Callable[[int], Path], reranker: CrossEncoder, new_bundle: Callable[..., Path]
) -> None:
    # 64 tokens of a chunk, three of which are special.
    assert len(reranker.rank("a " * 60, ["b " * 9], overflow="split")) == 1
    with pytest.raises(InputError, match=r"The query has 64 tokens.* so that 1 to 63 fit\.\nShorten the query"):
        reranker.rank("a " * 61, ["b"], overflow="split")
    with pytest.raises(InputError, match="documents is one string"):
        reranker.rank("a", "b")
    for query in (None, ["a"]):
        with pytest.raises(InputError, match=r"^query is .*, of type (NoneType|list); it must be a string"):
            reranker.rank(query, ["b"])  # type: ignore[arg-type]
    several = r"one score per pair, and this bundle has 3 classes: LABEL_0, LABEL_1, LABEL_2\.\nUse CrossEncoder"
    with (
        CrossEncoder(saved(3) / "bundle", backend="onnxruntime") as encoder,
        hdruntime.load(saved(3) / "bundle", "onnxruntime") as session,
    ):
        for rank in (encoder.rank, session.rank):
            with pytest.raises(InputError, match=several):
                rank("a", ["b"])
    with pytest.raises(InputError, match=r"task is feature-extraction, which gives no scores of pairs\.\nBuild"):
        CrossEncoder(new_bundle())


@pytest.mark.pinned  # closer than other versions are to each other
def test_a_model_without_settings_is_cut_and_scored_as_sentence_transformers_does(
    saved: Callable[[int], Path], tmp_path: Path
) -> None:
    """Saved by transformers: nothing says what it is for. Its graph is that of the model with settings."""
    base = saved(3) / "base"
    bundle = with_settings_of(base, saved(3) / "bundle", tmp_path / "bundle")
    theirs = sentence_transformers.CrossEncoder(str(base), device="cpu")
    with CrossEncoder(bundle, backend="onnxruntime") as ours:
        assert ours.max_seq_length == theirs.max_seq_length
        assert_close(ours.predict(PAIRS), theirs.predict(PAIRS), atol=ATOL)


def test_numpy_results_need_no_pytorch(reranker: CrossEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises
    assert reranker.predict([("a", "b")], activation_fn="identity").shape == (1,)
    assert reranker.rank("a", ["b"])[0]["corpus_id"] == 0
