"""Keys of requests: the page's table, what each key does, the bodies that clients send, and ids of other tokenizers."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

import hdruntime
from fakes.recording_runner import RecordingRunner, answer
from hdruntime.bundle.reader import open_bundle
from hdruntime.serve import ServeOptions, application
from hdruntime.session import Session
from hdruntime.tasks import embedding as embedding_task
from hdruntime.tasks import requests, text_classification
from hdruntime.tasks.task import TextsBody
from support.tiny_bundle import make_bundle

CLS, SEP = 2, 3
WORDS = {"long": 4, "documents": 5, "are": 6, "read": 7, "whole": 8}
LONG = "long documents are read whole " * 5
PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
ROUTES = {
    "/v1/embeddings": embedding_task.EmbeddingsBody,
    "/embed": embedding_task.EmbedBody,
    "/embed_sparse": TextsBody,
    "/rerank": text_classification.RerankBody,
    "/predict": text_classification.PredictBody,
}
Ask = Callable[..., tuple[int, Any]]


def asked(app: Any, path: str, body: Any) -> tuple[int, Any]:
    """The status and the content that an application answers with."""

    async def ask() -> tuple[int, Any]:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://server") as client:
            found = await client.post(path, json=body)
            return found.status_code, found.json()

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Asks a server of a bundle of 16 tokens; a token's vector has its id and its place, twice."""
    bundle = open_bundle(make_bundle(tmp_path_factory.mktemp("embedding")))
    # An application for each request: its queue belongs to the event loop.
    return lambda path, body: asked(application(bundle, Session(bundle, RecordingRunner()), ServeOptions()), path, body)


def vector(*ids: int) -> np.ndarray:
    return answer(np.array(ids)).mean(0)


def vectors_of(found: tuple[int, Any]) -> np.ndarray:
    status, said = found
    assert status == 200, said
    return np.array([each["embedding"] for each in said["data"]], np.float32)


@pytest.fixture(scope="module")
def reranking(reranker_bundle: Path) -> Iterator[tuple[Ask, Session]]:
    """The same for a reranker of 64 tokens, and its session."""
    bundle = open_bundle(reranker_bundle)
    with hdruntime.load(bundle, "onnxruntime", threads=1) as session:
        yield lambda path, body: asked(application(bundle, session, ServeOptions()), path, body), session


# The table of the page


def table() -> dict[str, tuple[set[str], str]]:
    """Key -> its routes and what the page says of it."""
    rows = re.findall(r"^\| (`[^|]*) \| [^|]* \| ([^|]*) \| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    found: dict[str, tuple[set[str], str]] = {}
    for keys, routes, said in rows:
        if said.startswith(("honoured", "without effect", "refused")):
            named = set(ROUTES) if routes == "all" else set(re.findall(r"`(/[^`]*)`", routes))
            named |= {"/rerank"} if "rerank" in routes else set()
            for key in re.findall(r"`(\w+)`", keys):
                assert key not in found, f"{key} is there twice"
                found[key] = (named, said)
    return found


TABLE = table()


def test_the_page_has_every_key_that_a_body_has_and_no_other() -> None:
    honoured = {(key, route) for key, (routes, said) in TABLE.items() if "honoured" in said for route in routes}
    fields = {(field, route) for route, kind in ROUTES.items() for field in kind.__struct_fields__}
    others = {(key, route) for key, name in requests.OTHER_NAMES.items() for field, route in fields if field == name}
    assert honoured == fields | others
    idle = {key: routes for key, (routes, said) in TABLE.items() if said.startswith("without effect")}
    assert set(idle) == set(requests.WITHOUT_EFFECT)
    assert all(routes == set(ROUTES) for routes in idle.values())
    for key, values in requests.WITHOUT_EFFECT.items():
        for value in values or ():
            written = str(value).lower() if isinstance(value, bool) else str(value).replace("'", '"')
            assert written in TABLE[key][1], f"{key}: {value}"


REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": [LONG, "long documents"]},
    "/embed": {"inputs": [LONG, "long documents"]},
    "/rerank": {"query": "w1 w2", "documents": ["w7 w8 w9 w10", "w8 w9 w10 w12 w11"]},
    "/predict": {"inputs": ["w7 w8 w9 w10"]},
}
SHORT: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["long documents", "read"]},
    "/embed": {"inputs": ["long documents", "read"]},
}
CHANGES: dict[str, Any] = {
    "input": "read",
    "inputs": "read",
    "query": "w3",
    "documents": ["w7"],
    "texts": ["w7"],
    "truncate": {"/v1/embeddings": "end", "/embed": True, "/rerank": "middle", "/predict": "middle"},
    "truncation": {"/v1/embeddings": True, "/embed": True, "/rerank": True, "/predict": "yes"},
    "truncate_prompt_tokens": 5,
    "max_tokens_per_doc": 1,
    "max_tokens_per_query": 1,
    "encoding_format": "base64",
    "dimensions": 2,
    "normalize": {"/v1/embeddings": True, "/embed": False},
    "prompt_name": "nobody",
    "late_chunking": True,
    "top_n": 1,
    "return_documents": True,
    "return_text": "yes",
    "raw_scores": True,
    "use_activation": False,
}
"""A value with which each key changes the answer, or is refused by its value."""


@pytest.mark.parametrize("key", [key for key, (_, said) in TABLE.items() if "honoured" in said])
def test_a_key_that_is_honoured_changes_the_answer(key: str, embedding: Ask, reranking: Any) -> None:
    # Served by the code of /embed, of a bundle that takes long to make.
    for route in sorted(TABLE[key][0] - {"/embed_sparse"}):
        ask = embedding if "embed" in route else reranking[0]
        request = REQUESTS[route] if key.startswith("trunc") else SHORT.get(route, REQUESTS[route])
        value = CHANGES[requests.OTHER_NAMES.get(key, key)]
        value = value[route] if isinstance(value, dict) else value
        given = {name: old for name, old in request.items() if (key, name) != ("texts", "documents")}
        plain, changed = ask(route, request), ask(route, given | {key: value})
        assert changed != plain, route
        assert "unknown field" not in str(changed[1])
        if key in requests.OTHER_NAMES:
            assert changed == ask(route, request | {requests.OTHER_NAMES[key]: value}), "two names of one key"


@pytest.mark.parametrize("key", requests.WITHOUT_EFFECT)
def test_a_key_without_effect_changes_nothing_and_with_another_value_is_refused(
    key: str, embedding: Ask, reranking: Any
) -> None:
    values = requests.WITHOUT_EFFECT[key]
    for route, request in (REQUESTS | SHORT).items():
        ask = embedding if "embed" in route else reranking[0]
        plain = ask(route, request)
        assert plain[0] == 200
        for value in values or ("anything", 5):
            assert ask(route, request | {key: value}) == plain
        if values is not None:
            status, said = ask(route, request | {key: "another"})
            assert status == 400
            assert key in said["error"]["message"]


@pytest.mark.parametrize("key", [key for key, (_, said) in TABLE.items() if said.startswith("refused")])
def test_a_key_that_cannot_be_honoured_is_refused_by_name(key: str, embedding: Ask, reranking: Any) -> None:
    for route, request in (REQUESTS | SHORT).items():
        ask = embedding if "embed" in route else reranking[0]
        for value in ("text", False):
            status, said = ask(route, request | {key: value})
            assert status == 400
            assert f"unknown field `{key}`" in said["error"]["message"]
            assert "truncate" in said["error"]["message"], "the keys that there are"


def test_a_key_whose_value_is_null_is_absent(embedding: Ask, reranking: Any) -> None:
    for route, request in (REQUESTS | SHORT).items():
        ask = embedding if "embed" in route else reranking[0]
        every = {key: None for key in [*TABLE, "nobody_knows_this"] if key not in request}
        assert ask(route, request | every) == ask(route, request)
        first = next(iter(request))
        status, said = ask(route, request | {first: None})
        assert (status, f"required field `{first}`" in said["error"]["message"]) == (400, True)


def test_keys_that_contradict_each_other_are_refused(embedding: Ask, reranking: Any) -> None:
    for more in (
        {"truncate": "error", "truncation": True},
        {"truncate": "split", "truncate_prompt_tokens": 5},
        {"dimensions": 2, "output_dimension": 3},
    ):
        status, said = embedding("/v1/embeddings", SHORT["/v1/embeddings"] | more)
        assert (status, "contradict each other" in said["error"]["message"]) == (400, True)
    agreeing = {"truncate": "END", "truncation": True, "truncate_prompt_tokens": -1}
    for more in (agreeing, {"dimensions": 2, "output_dimension": 2}):
        assert embedding("/v1/embeddings", SHORT["/v1/embeddings"] | more)[0] == 200
    for body, message in (
        ({"input": "read", "truncate_prompt_tokens": 2}, "Give 3 or more, or -1"),
        ({"input": "read", "truncate_prompt_tokens": -2}, "Give 3 or more, or -1"),
        ({"input": "read", "late_chunking": True, "truncate_prompt_tokens": 5}, "late_chunking reads whole texts"),
    ):
        status, said = embedding("/v1/embeddings", body)
        assert (status, message in said["error"]["message"]) == (400, True), said
    status, said = reranking[0]("/rerank", REQUESTS["/rerank"] | {"max_tokens_per_doc": -1})
    assert (status, "1 or more" in said["error"]["message"]) == (400, True)


# What clients send by default, as it was recorded

T, Q, D = ["long documents", "read"], "w1 w2", ["w7 w8", "w9"]
SENT: dict[str, tuple[str, dict[str, Any]]] = {
    "openai 3.57": ("/v1/embeddings", {"model": "m", "input": T, "encoding_format": "base64"}),
    "haystack-ai 3.4": ("/v1/embeddings", {"model": "m", "input": T[0], "encoding_format": "float"}),
    "llama-index-embeddings-jinaai": ("/v1/embeddings", {"model": "m", "input": T, "encoding_type": "float"}),
    "litellm 1.110": ("/v1/embeddings", {"model": "m", "input": T}),
    "voyageai 0.5": (
        "/v1/embeddings",
        {
            "input": T,
            "model": "m",
            "input_type": None,
            "truncation": True,
            "output_dtype": None,
            "output_dimension": None,
            "encoding_format": "base64",
        },
    ),
    "langchain-voyageai": ("/v1/embeddings", {"input": T, "model": "m", "input_type": "document", "truncation": True}),
    "huggingface_hub 2.4": ("/embed", {"inputs": T}),
    "huggingface_hub 2.4, with options": (
        "/embed",
        {"inputs": T, "normalize": True, "truncate": True, "truncation_direction": "right"},
    ),
    "llama-index text-embeddings-inference": ("/embed", {"inputs": T, "truncate": True}),
    "cohere 5.21 and 7.3, v1 and v2": ("/v2/rerank", {"model": "m", "query": Q, "documents": D}),
    "langchain-cohere 0.6": (
        "/v2/rerank",
        {"model": "m", "query": Q, "documents": D, "top_n": 3, "max_tokens_per_doc": None},
    ),
    "cohere-haystack 11.0": (
        "/v2/rerank",
        {"model": "m", "query": Q, "documents": D, "top_n": 10, "max_tokens_per_doc": 4096},
    ),
    "jina-haystack": ("/v1/rerank", {"query": Q, "documents": D, "model": "m", "top_n": None}),
    "litellm 1.110, rerank": ("/v1/rerank", {"model": "m", "query": Q, "documents": D, "return_documents": True}),
    "litellm 1.110, huggingface": (
        "/rerank",
        {"raw_scores": False, "truncation_direction": "Right", "query": Q, "texts": D, "return_text": True},
    ),
    "infinity_client 0.0.78": (
        "/v1/rerank",
        {"query": Q, "documents": D, "return_documents": False, "raw_scores": False, "model": "m"},
    ),
    "voyageai 0.5, rerank": (
        "/v1/rerank",
        {"query": Q, "documents": D, "model": "m", "top_k": None, "truncation": True},
    ),
}


@pytest.mark.parametrize("client", SENT)
def test_what_a_client_sends_by_default_is_answered(client: str, embedding: Ask, reranking: Any) -> None:
    path, body = SENT[client]
    status, said = (embedding if "embed" in path else reranking[0])(path, body)
    assert status == 200, said
    if "voyage" in client and "rerank" in path:
        assert {each["index"] for each in said["data"]} == {0, 1}, "where that client reads them"
    elif path.endswith("v1/rerank"):
        assert {each["index"] for each in said["results"]} == {0, 1}
        assert said["usage"]["prompt_tokens"] == said["usage"]["total_tokens"] > 0


def test_vectors_in_base64_and_shortened_by_other_names_are_the_same(embedding: Ask) -> None:
    expected = vectors_of(embedding("/v1/embeddings", {"input": T}))
    np.testing.assert_allclose(expected, [vector(CLS, 4, 5, SEP), vector(CLS, 7, SEP)], rtol=1e-6)
    for key in ("encoding_format", "embedding_type", "encoding_type"):
        _, said = embedding("/v1/embeddings", {"input": T, key: "base64"})
        found = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in said["data"]]
        np.testing.assert_array_equal(found, expected)
    short = vectors_of(embedding("/v1/embeddings", {"input": T, "output_dimension": 2, "normalized": True}))
    np.testing.assert_allclose(
        short, expected[:, :2] / np.linalg.norm(expected[:, :2], axis=1, keepdims=True), rtol=1e-6
    )


# Cuts


def test_documents_and_queries_are_cut_to_so_many_tokens(reranking: Any) -> None:
    ask, session = reranking
    words = [[f"w{number}" for number in range(first, first + 12)] for first in (7, 20)]
    query = "w1 w2 w3"

    def scores(**more: Any) -> list[float]:
        status, said = ask("/v2/rerank", {"query": query, "documents": [" ".join(each) for each in words]} | more)
        assert status == 200, said
        return [each["relevance_score"] for each in sorted(said["results"], key=lambda result: result["index"])]

    def expected(query: str, documents: list[str]) -> list[float]:
        ranked = session.rank(query, documents, overflow="truncate")
        return [each["score"] for each in sorted(ranked, key=lambda result: result["corpus_id"])]

    whole = expected(query, [" ".join(each) for each in words])
    for tokens in (1, 5, 11, 12, 13, 4096):
        cut = expected(query, [" ".join(each[:tokens]) for each in words])
        np.testing.assert_allclose(scores(max_tokens_per_doc=tokens), cut, rtol=1e-5)
        assert np.allclose(cut, whole, rtol=1e-5) == (tokens >= 12), "a document that is not cut has another score"
    np.testing.assert_allclose(scores(max_tokens_per_doc=0, max_tokens_per_query=0), whole, rtol=1e-6)
    both = expected("w1 w2", [" ".join(each[:3]) for each in words])
    np.testing.assert_allclose(scores(max_tokens_per_doc=3, max_tokens_per_query=2), both, rtol=1e-5)
    # 3 special tokens and 3 of the query leave 6 of the document.
    in_all = expected(query, [" ".join(each[:6]) for each in words])
    np.testing.assert_allclose(scores(truncate_prompt_tokens=12), in_all, rtol=1e-5)


def test_a_documents_cut_comes_before_the_pairs(reranking: Any) -> None:
    ask, _ = reranking
    long = " ".join(["w7"] * 100)
    request = {"query": "w1", "documents": [long], "truncate": "error"}
    assert ask("/rerank", request)[0] == 400
    assert ask("/rerank", request | {"max_tokens_per_doc": 61})[0] == 400, "with 3 special tokens 65, and 64 fit"
    assert ask("/rerank", request | {"max_tokens_per_doc": 60})[0] == 200
    split = {"query": "w1", "documents": [long], "truncate": "split"}
    assert ask("/rerank", split | {"max_tokens_per_doc": 70})[1] != ask("/rerank", split)[1]


# Ids


def test_ids_without_the_tokenizers_special_tokens_are_refused(embedding: Ask) -> None:
    for given, number in (
        ([5, 6, 7], 0),
        ([[5, 6, 7]], 0),
        ([[CLS, 5, SEP], [CLS, 5]], 1),
        ([[CLS, 5, SEP], [5, SEP]], 1),
    ):
        for more in ({}, {"truncate": "end"}, {"truncate": "split"}):
            status, said = embedding("/v1/embeddings", {"input": given} | more)
            message = said["error"]["message"]
            assert status == 400
            assert message.startswith(f"input[{number}]: The ids lack special tokens")
            assert "2 ([CLS]) before every text and 3 ([SEP]) after every text" in message
            assert "check_embedding_ctx_length=False" in message
    for given in ([CLS, 5, 6, SEP], [[CLS, 5, 6, SEP]]):
        np.testing.assert_allclose(
            vectors_of(embedding("/v1/embeddings", {"input": given})), [vector(CLS, 5, 6, SEP)], rtol=1e-6
        )
    pair = [CLS, 5, SEP, 6, SEP]
    np.testing.assert_allclose(vectors_of(embedding("/v1/embeddings", {"input": pair})), [vector(*pair)], rtol=1e-6)


def test_ids_are_cut_to_the_vector_of_their_text(embedding: Ask) -> None:
    ids = [CLS, *[WORDS[word] for word in LONG.split()], SEP]
    for more in (
        {"truncate": "end"},
        {"truncation": True},
        {"truncate_prompt_tokens": 9},
        {"truncate_prompt_tokens": -1},
    ):
        by_text, by_ids = (vectors_of(embedding("/v1/embeddings", {"input": each} | more)) for each in (LONG, ids))
        np.testing.assert_array_equal(by_ids, by_text)
    assert embedding("/v1/embeddings", {"input": ids})[0] == 400
