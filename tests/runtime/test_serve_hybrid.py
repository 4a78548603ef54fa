"""A server of a bundle of three kinds of embeddings: FlagEmbedding's keys, and the routes of each kind."""

from __future__ import annotations

import base64
import pkgutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

import hdruntime
from hdruntime import HybridEmbedding
from hdruntime.bundle.reader import open_bundle
from hdruntime.serve import ServeOptions, application, embedding_types
from hdruntime.session import Session
from hdruntime.text.embeddings import EmbeddingPrecision, normalized, quantized
from support.bge_m3_models import TOKEN_WIDTH, WIDTH, made_bge_m3
from support.serving import answers_of, command

TEXTS = ["w7 w8 w9 w8", "w9 unknown w11 w12 w13", "w5"]
LONG = "w5 " * 100
ATOL = 1e-6
ALL = {"return_dense": True, "return_sparse": True, "return_colbert_vecs": True}

Ask = Callable[..., tuple[int, Any]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_bge_m3(tmp_path_factory) / "bundle"


@pytest.fixture(scope="module")
def session(path: Path) -> Iterator[Session]:
    with hdruntime.load(path, "onnxruntime", threads=1) as session:
        yield session


@pytest.fixture(scope="module")
def ask(path: Path, session: Session) -> Ask:
    bundle = open_bundle(path)

    def ask(route: str, **body: Any) -> tuple[int, Any]:
        (found,) = answers_of(application(bundle, session, ServeOptions()), (route, body))
        return found.status_code, found.json()

    return ask


@pytest.fixture(scope="module")
def expected(session: Session) -> list[HybridEmbedding]:
    return session.embed_hybrid(TEXTS)


def data_of(answer: tuple[int, Any]) -> list[dict[str, Any]]:
    status, said = answer
    assert status == 200, said
    data: list[dict[str, Any]] = said["data"]
    return data


def weights_of(embedding: HybridEmbedding) -> dict[str, float]:
    assert embedding.sparse is not None
    return dict(zip(map(str, embedding.sparse.indices), embedding.sparse.values.tolist(), strict=True))


def assert_close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2 * ATOL)


def test_one_request_has_all_three_kinds(ask: Ask, expected: list[HybridEmbedding], session: Session) -> None:
    status, said = ask("/v1/embeddings", input=TEXTS, model="any", **ALL)
    for each, wanted in zip(data_of((status, said)), expected, strict=True):
        assert_close(each["embedding"], wanted.dense)
        assert_close(each["colbert_vecs"], wanted.colbert)
        assert each["lexical_weights"] == pytest.approx(weights_of(wanted), abs=ATOL)
    assert said["usage"]["total_tokens"] == sum(map(len, session.tokenize(TEXTS))), "the texts are run once"


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({}, {"embedding"}),
        ({"return_sparse": True}, {"embedding", "lexical_weights"}),
        ({"return_dense": False, "return_sparse": True}, {"lexical_weights"}),
        ({"return_dense": False, "return_colbert_vecs": True}, {"colbert_vecs"}),
    ],
)
def test_kinds_are_there_on_request(keys: dict[str, bool], found: set[str], ask: Ask) -> None:
    for each in data_of(ask("/v1/embeddings", input=TEXTS, **keys)):
        assert {*each} == found | {"object", "index"}


def test_each_kind_has_the_routes_of_its_own_bundles(ask: Ask, expected: list[HybridEmbedding]) -> None:
    dense = [each.dense for each in expected]
    assert_close([each["embedding"] for each in data_of(ask("/v1/embeddings", input=TEXTS))], dense)
    assert_close(ask("/embed", inputs=TEXTS)[1], dense)
    status, of_cohere = ask("/v2/embed", texts=TEXTS, model="any", input_type="search_query", embedding_types=["float"])
    assert status == 200, of_cohere
    assert_close(of_cohere["embeddings"]["float"], dense)
    status, refused = ask("/v1/contextualizedembeddings", inputs=[TEXTS])
    assert (status, "pools tokens by cls" in refused["error"]["message"]) == (400, True)
    sparse = [{str(each["index"]): each["value"] for each in row} for row in ask("/embed_sparse", inputs=TEXTS)[1]]
    for row, wanted in zip(sparse, expected, strict=True):
        assert row == pytest.approx(weights_of(wanted), abs=ATOL)
    for side in ("query", "document"):
        tokens = data_of(ask("/v1/multi-vector", input=TEXTS, input_type=side))
        for each, wanted in zip(tokens, expected, strict=True):
            assert_close(each["embeddings"], wanted.colbert)
    shorter = data_of(ask("/v1/multi-vector", input=TEXTS, dimensions=8))
    for each, wanted in zip(shorter, expected, strict=True):
        assert_close(each["embeddings"], normalized(np.asarray(wanted.colbert)[:, :8]))


def test_types_and_truncation_are_those_of_other_embeddings(
    ask: Ask, expected: list[HybridEmbedding], session: Session
) -> None:
    for each, wanted in zip(
        data_of(ask("/v1/embeddings", input=TEXTS, encoding_format="base64", **ALL)), expected, strict=True
    ):
        assert_close(np.frombuffer(base64.b64decode(each["embedding"]), "<f4"), wanted.dense)
        assert_close([np.frombuffer(base64.b64decode(token), "<f4") for token in each["colbert_vecs"]], wanted.colbert)
    for each, wanted in zip(
        data_of(ask("/v1/embeddings", input=TEXTS, output_dtype="ubinary", **ALL)), expected, strict=True
    ):
        for key, floats in (("embedding", wanted.dense), ("colbert_vecs", wanted.colbert)):
            assert each[key] == quantized(np.asarray(floats), EmbeddingPrecision.UBINARY).tolist()
    (each,) = data_of(ask("/v1/embeddings", input=LONG, truncate="end", return_sparse=True))
    (wanted,) = session.embed_hybrid([LONG], overflow="truncate")
    assert each["truncated"] is True
    assert_close(each["embedding"], wanted.dense)
    (each,) = data_of(ask("/v1/embeddings", input=LONG, truncate="split", return_colbert_vecs=True))
    (wanted,) = session.embed_hybrid([LONG], overflow="split")
    assert_close(each["colbert_vecs"], wanted.colbert)
    ids = [each.input_ids for each in session.tokenize(TEXTS)]
    assert data_of(ask("/v1/embeddings", input=ids, **ALL)) == data_of(ask("/v1/embeddings", input=TEXTS, **ALL))


@pytest.mark.parametrize(
    ("made_by", "route", "body"),
    [
        ("openai._lexical_weights", "/v1/embeddings", {"input": TEXTS, "return_sparse": True}),
        ("tei.json_sparse", "/embed_sparse", {"inputs": TEXTS}),
        (
            "kserve.KServeInterface._output_of",
            "/v2/models/{model}/infer",
            {"inputs": [{"name": "TEXT", "shape": [len(TEXTS)], "datatype": "BYTES", "data": TEXTS}]},
        ),
    ],
)
def test_the_json_of_many_values_is_made_in_another_thread(
    made_by: str, route: str, body: dict[str, Any], ask: Ask, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, route = set[int](), route.format(model=session.manifest.name)
    name = f"hdruntime.serve.interfaces.{made_by}"
    make = pkgutil.resolve_name(name)

    def noted(*given: Any) -> Any:
        threads.add(threading.get_ident())
        return make(*given)

    monkeypatch.setattr(name, noted)
    status, expected = ask(route, **body)
    assert (status, threads) == (200, {threading.get_ident()})
    threads.clear()
    monkeypatch.setattr(embedding_types, "_MANY_VALUES", 0)
    assert ask(route, **body) == (200, expected)
    assert len(threads) == 1
    assert threading.get_ident() not in threads


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no kind": ({"return_dense": False}, "names no kind of embeddings"),
    "dimensions": ({"return_sparse": True, "dimensions": 4}, "dimensions are of dense embeddings"),
    "chunks": ({"return_sparse": True, "late_chunking": True}, "late_chunking and dimensions"),
    "length of none": ({"return_dense": False, "return_sparse": True, "normalize": True}, "normalize is of dense"),
    "bits of none": ({"return_dense": False, "return_sparse": True, "output_dtype": "ubinary"}, "weights are numbers"),
    "int8 tokens": ({"return_colbert_vecs": True, "output_dtype": "int8"}, "return_colbert_vecs gives no int8"),
    "int8": ({"return_sparse": True, "output_dtype": "int8"}, "--ranges FILE"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kinds_do_not_have_is_refused(case: str, ask: Ask) -> None:
    keys, said = REFUSED[case]
    status, answer = ask("/v1/embeddings", input=TEXTS, **keys)
    assert (status, said in answer["error"]["message"]) == (400, True), answer


def test_a_bundle_of_one_kind_refuses_the_keys(sample_bundle: Path) -> None:
    with hdruntime.load(sample_bundle, "onnxruntime", threads=1) as session:
        served = application(open_bundle(sample_bundle), session, ServeOptions())
        (found,) = answers_of(served, ("/v1/embeddings", {"input": TEXTS, "return_sparse": True}))
    assert (found.status_code, "has dense embeddings alone" in found.text) == (400, True)


def test_openais_client_reads_the_other_kinds(path: Path, expected: list[HybridEmbedding]) -> None:
    with command(path) as (client, _):
        theirs = openai.OpenAI(base_url=f"{str(client.base_url).rstrip('/')}/v1", api_key="none")
        found = theirs.embeddings.create(model="any", input=TEXTS, extra_body=ALL).data
        for each, wanted in zip(found, expected, strict=True):
            extra: Any = each
            assert_close(each.embedding, wanted.dense)
            assert extra.lexical_weights == pytest.approx(weights_of(wanted), abs=ATOL)
            decoded = [np.frombuffer(base64.b64decode(token), "<f4") for token in extra.colbert_vecs]
            assert_close(decoded, wanted.colbert)
        sparse: Any = theirs.embeddings.create(
            model="any", input=TEXTS, extra_body={"return_dense": False, "return_sparse": True}
        ).data
        assert [*sparse[0].lexical_weights] == [*weights_of(expected[0])]
    assert np.asarray(expected[0].colbert).shape[-1] == TOKEN_WIDTH != WIDTH
