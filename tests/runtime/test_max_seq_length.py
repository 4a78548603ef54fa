"""The length of texts: every way to an answer truncates to the model's own length, unless another is asked for."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

import hdruntime
from hdexport.support.bundle_writer import seal
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.sentence_settings import MultiVectorSettings, QueryExpansion, SentenceSettings
from hdruntime.errors import InputError
from hdruntime.jobs.rows import Columns
from hdruntime.serve import ServeOptions, application
from hdruntime.text.encoding import Overflow
from hdruntime.text.lengths import MaxSeqLength, checked_length, model_length
from support.comparators import assert_close
from support.job_runs import read, run
from support.made_once import made_once
from support.tiny_models import save_sentence_modules, save_tiny_model

OWN, POSITIONS = 24, 64

TEXT = " ".join(f"w{number}" for number in range(5, 55))
"""52 tokens with the special ones: more than the model's own length, and fewer than the bundle runs."""

TRUNCATED = " ".join(TEXT.split()[: OWN - 2])

ATOL = 1e-5


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence model of 24 tokens and 64 positions, and its bundle."""
    from hdexport.build import BuildOptions, build

    def make(directory: Path) -> None:
        checkpoint = directory / "checkpoint"
        save_tiny_model(checkpoint, "bert", Task.FEATURE_EXTRACTION)
        save_sentence_modules(checkpoint, pooling={"pooling_mode": "mean", "embedding_dimension": 32})
        (checkpoint / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": OWN}))
        build(BuildOptions(model=checkpoint, output=directory / "bundle", max_len=POSITIONS, verify=None))

    return made_once(tmp_path_factory, "sentence model of 24 of 64 tokens", make)


def server_answers(bundle: Path, path: str, body: dict[str, Any], **options: Any) -> httpx2.Response:
    """The answer of a server's application to one request."""

    async def ask() -> httpx2.Response:
        opened = open_bundle(bundle)
        with hdruntime.load(opened, "onnxruntime", **options) as session:
            transport = httpx2.ASGITransport(application(opened, session, ServeOptions()))
            async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.post(path, json=body)

    return asyncio.run(ask())


def every_way(bundle: Path, folder: Path, length: int | MaxSeqLength | None) -> dict[str, np.ndarray]:
    """The text's embedding by each way to it."""
    found = {}
    with hdruntime.SentenceEncoder(bundle, max_seq_length=length) as encoder:
        found["encoder"] = encoder.encode(TEXT)
        found["unpickled encoder"] = pickle.loads(pickle.dumps(encoder)).encode(TEXT)
    with hdruntime.load(bundle, max_seq_length=length) as session:
        found["session"] = session.embed([TEXT], overflow="truncate")[0]
        (ids,) = session.tokenize([TEXT], overflow="truncate")
        found["session, tokens"] = session.infer([ids])[0]["sentence_embedding"]
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"text": TEXT}) + "\n")
    options = {"overflow": Overflow.TRUNCATE, "max_seq_length": length}
    done = run(bundle, rows, folder / f"{length}.jsonl", **options)
    assert done.truncated_rows == (length != "bundle")
    found["job"] = np.array(read(folder / f"{length}.jsonl")[0]["embedding"])
    answer = server_answers(bundle, "/v1/embeddings", {"input": TEXT, "truncate": "end"}, max_seq_length=length)
    found["server"] = np.array(answer.json()["data"][0]["embedding"])
    return found


def test_without_a_length_every_way_truncates_as_sentence_transformers_does(made: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers").SentenceTransformer(str(made / "checkpoint"), device="cpu")
    assert library.max_seq_length == OWN
    for length, theirs in (("model", OWN), ("bundle", POSITIONS), (17, 17), (None, OWN)):
        library.max_seq_length = theirs
        expected = library.encode(TEXT)
        for way, found in every_way(made / "bundle", tmp_path, length).items():
            assert np.abs(found - expected).max() < ATOL, f"{way}, max_seq_length={length}"
    library.max_seq_length = OWN + 1
    with pytest.raises(AssertionError):
        assert_close(library.encode(TEXT), found, atol=ATOL)


def test_the_length_that_the_build_was_asked_for_goes_before_the_models(made: Path, tmp_path: Path) -> None:
    bundle = resealed(made / "bundle", tmp_path / "asked", text_length=40)
    whole, own, asked = (every_way(bundle, tmp_path, length) for length in ("bundle", "model", None))
    with hdruntime.load(bundle, max_seq_length=40) as session:
        expected = session.embed([TEXT], overflow="truncate")[0]
    for way in whole:
        assert_close(asked[way], expected, atol=ATOL)
        assert min(np.abs(asked[way] - whole[way]).max(), np.abs(asked[way] - own[way]).max()) > 0.01


def resealed(bundle: Path, copy: Path, *, sentence: SentenceSettings | None = None, **changes: Any) -> Path:
    """A copy of a bundle whose tokenizer's information is changed."""
    shutil.copytree(bundle, copy)
    manifest = open_bundle(copy).manifest
    assert manifest.tokenizer is not None
    tokenizer = dataclasses.replace(manifest.tokenizer, **changes)
    seal(copy, dataclasses.replace(manifest, tokenizer=tokenizer, sentence=sentence or manifest.sentence))
    return copy


ANSWERS: dict[str, Callable[[Any, str], Any]] = {
    "token-classification": lambda session, text: session.entities([text], overflow="truncate"),
    "question-answering": lambda session, text: session.answers(["w3"], [text], overflow="truncate", top_k=3),
}


@pytest.mark.parametrize("task", ["token-classification", "question-answering"])
def test_the_own_length_of_the_tokenizer_holds_in_every_task_and_for_pairs(
    task: str, tiny_bundles: Any, tmp_path: Path
) -> None:
    """Tasks without settings of sentence-transformers have the length of the tokenizer: model_max_length."""
    bundle = resealed(tiny_bundles("bert", task).path, tmp_path / "bundle", model_max_length=OWN)
    special = 4 if task == "question-answering" else 2
    answer, truncated = ANSWERS[task], " ".join(TEXT.split()[: OWN - special])
    with hdruntime.load(bundle) as session:
        assert session.max_seq_length == OWN < session.max_len
        assert str(answer(session, TEXT)) == str(answer(session, truncated))
        whole = TEXT if task == "question-answering" else f"{truncated} w60"
        with hdruntime.load(bundle, max_seq_length="bundle") as other:
            assert str(answer(other, whole)) != str(answer(other, truncated))


def test_a_text_beyond_the_length_is_refused_with_a_hint_that_works(made: Path, tmp_path: Path) -> None:
    bundle = made / "bundle"
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text(json.dumps({"text": TEXT}) + "\n")
    said = f"has 52 tokens; max_seq_length is {OWN}.\n"
    with hdruntime.load(bundle) as session:
        with pytest.raises(InputError, match=said):
            session.embed([TEXT])
        with pytest.raises(InputError, match=rf"characters and more than {OWN} tokens; max_seq_length is {OWN}\."):
            session.embed([TEXT * 100])
    run(bundle, rows, out)
    (row,) = read(out)
    assert said in row["error"]
    assert row["error"].endswith("or run up to 64 tokens of it (max_seq_length='bundle').")
    run(bundle, rows, tmp_path / "whole.jsonl", max_seq_length="bundle")
    assert read(tmp_path / "whole.jsonl")[0]["tokens"] == 52
    answer = server_answers(bundle, "/v1/embeddings", {"input": TEXT})
    assert (answer.status_code, f"max_seq_length is {OWN}." in answer.text) == (400, True)


def test_chunks_of_a_split_text_have_the_length(made: Path, tmp_path: Path) -> None:
    with hdruntime.load(made / "bundle") as session:
        (split,) = session.split([TEXT])
        assert [len(chunk) for chunk in split.chunks] == [OWN, OWN, 50 - 2 * (OWN - 2) + 2]
        late = session.embed_chunks(TEXT, chunks="tokens:10")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": TEXT}) + "\n")
    run(made / "bundle", rows, tmp_path / "out.jsonl", late_chunking="tokens:10")
    assert_close(np.array([row["embedding"] for row in read(tmp_path / "out.jsonl")]), late.vectors, atol=ATOL)


def test_rows_of_ids_have_the_length(made: Path, tmp_path: Path) -> None:
    rows, columns = tmp_path / "rows.jsonl", Columns(id="", input_ids="ids")
    rows.write_text(json.dumps({"ids": [0, *range(5, 55), 2]}) + "\n")
    for length, tokens in ((None, OWN), ("bundle", 52), (30, 30)):
        out, options = tmp_path / f"{length}.jsonl", {"overflow": Overflow.TRUNCATE, "max_seq_length": length}
        run(made / "bundle", rows, out, columns=columns, **options)
        assert read(out)[0]["tokens"] == tokens


def test_truncated_ids_keep_the_special_tokens_that_a_truncated_text_keeps(made: Path, tmp_path: Path) -> None:
    rows, columns = tmp_path / "rows.jsonl", Columns(id="", input_ids="ids")
    with hdruntime.load(made / "bundle") as session:
        (expected,) = session.embed([TEXT], overflow="truncate")
        (whole,) = session.tokenizer.encode([TEXT], overflow="split")
        ids = whole.input_ids
    without_end = [*ids[:-1], ids[1]]
    rows.write_text("".join(json.dumps({"ids": each}) + "\n" for each in (ids, without_end, ids[:OWN])))
    run(made / "bundle", rows, tmp_path / "out.jsonl", columns=columns, overflow=Overflow.TRUNCATE)
    found, other, first = (np.array(row["embedding"]) for row in read(tmp_path / "out.jsonl"))
    assert_close(found, expected, atol=ATOL)
    assert_close(other, first, atol=ATOL)
    assert np.abs(found - first).max() > 0.01


def test_the_first_truncated_text_is_said_once(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with hdruntime.load(made / "bundle") as session:
        session.embed([TRUNCATED], overflow="truncate")
        assert caplog.messages == []
        session.embed([TEXT, TEXT], overflow="truncate")
        session.embed([TEXT], overflow="truncate")
    (said,) = caplog.messages
    assert said.startswith("Texts of more than 24 tokens are truncated to that many; the bundle runs up to 64.\n")
    assert said.endswith("max_seq_length of hdruntime.load sets another number, or 'bundle' for the longest.")
    caplog.clear()
    with hdruntime.load(made / "bundle", max_seq_length="bundle") as session:
        session.embed([f"{TEXT} {TEXT}"], overflow="truncate")
    (said,) = caplog.messages
    assert said.endswith("sets a smaller number; build the bundle again with a larger max_len for longer texts.")


def test_a_job_that_goes_on_with_another_length_is_refused_before_it_starts(made: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": TEXT}) + "\n")
    with pytest.raises(InputError, match=r"max_seq_length is 65; it must be 1 to 64 tokens for this bundle\.\nBuild"):
        run(made / "bundle", rows, tmp_path / "out.jsonl", max_seq_length=65)
    with pytest.raises(InputError, match=r"max_seq_length is 'own'; it must be a number of tokens, 'model' or"):
        run(made / "bundle", rows, tmp_path / "out.jsonl", max_seq_length="own")


def expansion_of(strategy: Any) -> QueryExpansion:
    return QueryExpansion(strategy=strategy, length=20, token_id=4, attend=True)


QUERIES = [
    (MultiVectorSettings(), 40, 40),
    (MultiVectorSettings(query_length=16, document_length=30), 16, 30),
    (MultiVectorSettings(query_length=16, expansion=expansion_of("min")), 20, 40),
    (MultiVectorSettings(query_length=32, expansion=expansion_of("fixed")), 20, 40),
    (MultiVectorSettings(expansion=expansion_of("min")), 40, 40),
]


@pytest.mark.parametrize(("settings", "query", "document"), QUERIES)
def test_queries_and_documents_of_late_interaction_have_lengths_of_their_own(
    settings: MultiVectorSettings, query: int, document: int, made: Path
) -> None:
    manifest = open_bundle(made / "bundle").manifest
    assert manifest.tokenizer is not None
    sentence = SentenceSettings(kind="multi-vector-encoder", max_seq_length=40, multi_vector=settings)
    manifest = dataclasses.replace(manifest, sentence=sentence)
    assert (model_length(manifest, "query"), model_length(manifest, "document"), model_length(manifest)) == (
        query,
        document,
        40,
    )
    asked = dataclasses.replace(manifest, tokenizer=dataclasses.replace(manifest.tokenizer, text_length=50))
    lengths = [checked_length(None, asked, max_tokens=64, role=role) for role in ("query", "document", None)]
    assert lengths == [query, 50, 50]
    assert checked_length(None, asked, max_tokens=45, role="document") == 45
    assert [checked_length("model", asked, max_tokens=15, role=role) for role in ("query", "document")] == [15, 15]
