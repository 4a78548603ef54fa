"""Keys of requests: the page's table, what each key does, the bodies that clients send, and ids of other tokenizers."""

from __future__ import annotations

import base64
import functools
import json
import re
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

import hdruntime
from fakes.recording_runner import RecordingRunner, answer
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import InputError
from hdruntime.serve import ServeOptions, application, request_reader
from hdruntime.serve import request_body as requests
from hdruntime.serve.interfaces import cohere, contextualized, multi_vector, openai, rerank, tei, vllm
from hdruntime.serve.responses import number_ranges
from hdruntime.session import Session
from hdruntime.text.embeddings import EmbeddingPrecision, quantized
from support.serving import answers_of, message_of
from support.tiny_bundle import make_bundle

CLS, SEP = 2, 3
WORDS = {"long": 4, "documents": 5, "are": 6, "read": 7, "whole": 8}
LONG = "long documents are read whole " * 5
PAGE = Path(__file__).parents[2] / "docs" / "serve_api.md"
ROUTES = {
    "/v1/embeddings": openai.EmbeddingsBody,
    "/v1/contextualizedembeddings": contextualized.ContextualizedBody,
    "/v1/multi-vector": multi_vector.MultiVectorBody,
    "/v2/embed": cohere.CohereEmbedBody,
    "/embed": tei.EmbedBody,
    "/embed_all": tei.EmbedAllBody,
    "/embed_sparse": tei.TextsBody,
    "/rerank": rerank.RerankBody,
    "/predict": tei.PredictBody,
    "/score": vllm.ScoreBody,
    "/classify": vllm.ClassifyBody,
    "/pooling": vllm.PoolingBody,
}
Ask = Callable[..., tuple[int, Any]]


def asked(app: Any, path: str, body: Any) -> tuple[int, Any]:
    """The status and the content that an application answers with."""
    (found,) = answers_of(app, (path, body))
    content = found.json()
    if isinstance(content, dict):
        # Another one in each response.
        for name in {"id", "created"} & set(content):
            del content[name]
    return found.status_code, content


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
        if said.startswith(("supported", "without effect", "rejected")):
            named = set(ROUTES) if routes == "all" else set(re.findall(r"`(/[^`]*)`", routes))
            named |= {"/rerank"} if "rerank" in routes else set()
            for key in re.findall(r"`(\w+)`", keys):
                assert key not in found, f"{key} is there twice"
                found[key] = (named, said)
    return found


TABLE = table()


def test_the_page_has_every_key_that_a_body_has_and_no_other() -> None:
    supported = {(key, route) for key, (routes, said) in TABLE.items() if "supported" in said for route in routes}
    fields = {(field, route) for route, kind in ROUTES.items() for field in kind.__struct_fields__}
    others = {(key, route) for key, name in requests.OTHER_NAMES.items() for field, route in fields if field == name}
    assert supported == fields | others
    idle = {key: routes for key, (routes, said) in TABLE.items() if said.startswith("without effect")}
    assert set(idle) == set(requests.WITHOUT_EFFECT)
    assert all(routes == set(ROUTES) for routes in idle.values())
    for key, values in requests.WITHOUT_EFFECT.items():
        for value in values or ():
            written = str(value).lower() if isinstance(value, bool) else str(value).replace("'", '"')
            assert written in TABLE[key][1], f"{key}: {value}"


REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": [LONG, "long documents"]},
    "/v1/contextualizedembeddings": {"inputs": [[LONG], ["long documents"]]},
    "/embed": {"inputs": [LONG, "long documents"]},
    "/rerank": {"query": "w1 w2", "documents": ["w7 w8 w9 w10", "w8 w9 w10 w12 w11"]},
    "/predict": {"inputs": ["w7 w8 w9 w10"]},
    "/v2/embed": {"texts": [LONG, "long documents"]},
    "/embed_all": {"inputs": [LONG, "long documents"]},
    "/score": {"text_1": "w1 w2", "text_2": ["w7 w8 w9 w10", "w8 w9 w10 w12 w11"]},
    "/classify": {"input": ["w7 w8 w9 w10"]},
    "/pooling": {"input": ["w7 w8 w9 w10"]},
}
SHORT: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["long documents", "read"]},
    "/v1/contextualizedembeddings": {"inputs": [["long documents"], ["read"]]},
    "/embed": {"inputs": ["long documents", "read"]},
    "/v2/embed": {"texts": ["long documents", "read"]},
    "/embed_all": {"inputs": ["long documents", "read"]},
}
CHANGES: dict[str, Any] = {
    "input": "read",
    "inputs": {
        "/v1/contextualizedembeddings": [["read"]],
        "/v2/embed": [{"content": [{"text": "read"}]}],
        "/embed": "read",
        "/embed_all": "read",
        "/predict": "read",
    },
    "query": "w3",
    "documents": ["w7"],
    "texts": ["w7"],
    **dict.fromkeys(("text_1", "text_2", "queries", "items", "data_1", "data_2"), "w7"),
    "truncate": {
        "/v1/contextualizedembeddings": "error",
        "/v1/embeddings": "end",
        "/embed": True,
        "/v2/embed": "error",
        "/embed_all": True,
        **dict.fromkeys(("/rerank", "/predict", "/score", "/classify", "/pooling"), "middle"),
    },
    "truncation": {
        "/v1/contextualizedembeddings": False,
        "/v1/embeddings": True,
        "/embed": True,
        "/v2/embed": False,
        "/embed_all": True,
        "/rerank": True,
        **dict.fromkeys(("/predict", "/score", "/classify", "/pooling"), "yes"),
    },
    "truncate_prompt_tokens": 5,
    "truncation_side": "middle",
    "max_tokens": 3,
    "max_tokens_per_doc": 1,
    "max_tokens_per_query": 1,
    "encoding_format": "base64",
    "embedding_types": ["ubinary"],
    "output_dtype": "ubinary",
    "dimensions": 2,
    "normalize": {"/v1/embeddings": True, "/embed": False, "/embed_all": True},
    "prompt_name": "nobody",
    "input_type": "nobody",
    "late_chunking": True,
    "return_dense": False,
    "return_sparse": True,
    "return_colbert_vecs": True,
    "enable_auto_chunking": True,
    "chunk_size": 1,
    "chunk_overlap": 1,
    "top_n": 1,
    "return_documents": True,
    "raw_scores": True,
    "use_activation": False,
    "task": "token_embed",
    "parameters": {"/predict": {"function_to_apply": "none"}},
}
"""A value with which each key changes the answer, or is refused by its value."""


@pytest.mark.parametrize("key", [key for key, (_, said) in TABLE.items() if "supported" in said])
def test_a_key_that_is_supported_changes_the_answer(key: str, embedding: Ask, reranking: Any) -> None:
    # Of bundles that take long to make: by the code of /embed, and in test_serve_multi_vector.py.
    for route in sorted(TABLE[key][0] - {"/embed_sparse", "/v1/multi-vector"}):
        ask = embedding if "embed" in route else reranking[0]
        request = REQUESTS[route] if key.startswith("trunc") else SHORT.get(route, REQUESTS[route])
        value = CHANGES[requests.OTHER_NAMES.get(key, key)]
        value = value[route] if isinstance(value, dict) else value
        replaced = {("/rerank", "texts"): ("documents",), ("/v2/embed", "inputs"): ("texts",)}
        given = {name: old for name, old in request.items() if name not in replaced.get((route, key), ())}
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
            assert key in message_of(said)


@pytest.mark.parametrize("key", [key for key, (_, said) in TABLE.items() if said.startswith("rejected")])
def test_a_key_that_cannot_be_supported_is_refused_by_name(key: str, embedding: Ask, reranking: Any) -> None:
    for route, request in (REQUESTS | SHORT).items():
        ask = embedding if "embed" in route else reranking[0]
        for value in ("text", False):
            status, said = ask(route, request | {key: value})
            assert status == 400
            assert f"unknown field `{key}`" in message_of(said)
            assert "truncate" in message_of(said), "the keys that there are"


def test_a_key_whose_value_is_null_is_absent(embedding: Ask, reranking: Any) -> None:
    for route, request in (REQUESTS | SHORT).items():
        ask = embedding if "embed" in route else reranking[0]
        every = {key: None for key in [*TABLE, "nobody_knows_this"] if key not in request}
        assert ask(route, request | every) == ask(route, request)
        first = next(iter(request))
        status, said = ask(route, request | {first: None})
        assert (status, first in message_of(said)) == (400, True)


def test_keys_that_contradict_each_other_are_refused(embedding: Ask, reranking: Any) -> None:
    for more in (
        {"truncate": "error", "truncation": True},
        {"truncate": "split", "truncate_prompt_tokens": 5},
        {"dimensions": 2, "output_dimension": 3},
    ):
        status, said = embedding("/v1/embeddings", SHORT["/v1/embeddings"] | more)
        assert (status, "contradict each other" in message_of(said)) == (400, True)
    agreeing = {"truncate": "END", "truncation": True, "truncate_prompt_tokens": -1}
    for more in (agreeing, {"dimensions": 2, "output_dimension": 2}):
        assert embedding("/v1/embeddings", SHORT["/v1/embeddings"] | more)[0] == 200
    for body, message in (
        ({"input": "read", "truncate_prompt_tokens": 2}, "Give 3 or more, or -1"),
        ({"input": "read", "truncate_prompt_tokens": -2}, "Give 3 or more, or -1"),
        ({"input": "read", "late_chunking": True, "truncate_prompt_tokens": 5}, "late_chunking reads texts in full"),
        ({"input": LONG, "late_chunking": True, "truncate": "error"}, "The text has"),
        ({"input": [CLS, 5, SEP], "prompt_name": "nobody"}, "prompt_name"),
    ):
        status, said = embedding("/v1/embeddings", body)
        assert (status, message in message_of(said)) == (400, True), said
    for path, body in (
        ("/v2/embed", {"texts": ["read"], "max_tokens": 5, "truncate_prompt_tokens": 6}),
        ("/rerank", REQUESTS["/rerank"] | {"raw_scores": True, "use_activation": True}),
        ("/predict", REQUESTS["/predict"] | {"raw_scores": True, "parameters": {"function_to_apply": "softmax"}}),
    ):
        status, said = (embedding if "embed" in path else reranking[0])(path, body)
        assert (status, "contradict each other" in message_of(said)) == (400, True)
    status, said = embedding("/score", {"text_1": "read", "text_2": "long", "use_activation": True})
    assert (status, "use_activation is of classifiers" in message_of(said)) == (400, True)
    status, said = reranking[0]("/rerank", REQUESTS["/rerank"] | {"max_tokens_per_doc": -1})
    assert (status, "1 or more" in message_of(said)) == (400, True)


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
    "voyageai 0.5, contextualized": (
        "/v1/contextualizedembeddings",
        {
            "inputs": [T],
            "model": "m",
            "input_type": "document",
            "output_dtype": None,
            "output_dimension": None,
            "encoding_format": "base64",
        },
    ),
    "perplexityai 0.46": (
        "/v1/contextualizedembeddings",
        {"input": [T], "model": "m", "encoding_format": "base64_binary"},
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


TYPES = {
    "int8": EmbeddingPrecision.INT8,
    "uint8": EmbeddingPrecision.UINT8,
    "binary": EmbeddingPrecision.BINARY,
    "ubinary": EmbeddingPrecision.UBINARY,
}


@pytest.mark.parametrize("name", TYPES)
def test_types_are_those_of_the_vectors_by_the_servers_ranges(name: str, tmp_path: Path) -> None:
    ranges = np.array([[-1, -2, -1, -3], [1, 2, 1, 3]], np.float32)
    np.save(tmp_path / "ranges.npy", ranges)
    bundle = open_bundle(make_bundle(tmp_path / "bundle"))
    texts = ["long", "documents", "are", "read", "whole"]

    def ask(**keys: Any) -> list[Any]:
        # Other values than a RecordingRunner's, all of which are positive.
        with hdruntime.load(bundle, "onnxruntime", threads=1) as session:
            app = application(bundle, session, ServeOptions(), ranges=str(tmp_path / "ranges.npy"))
            status, said = asked(app, "/v1/embeddings", {"input": texts, **keys})
        assert status == 200, said
        return [each["embedding"] for each in said["data"]]

    # Equal to sentence-transformers', as tests/runtime/text/test_embeddings.py has it.
    expected = quantized(np.array(ask(), np.float32), TYPES[name], ranges if "int8" in name else None)
    assert len(np.unique(expected)) > 1
    for key in ("output_dtype", "embedding_type"):
        np.testing.assert_array_equal(ask(**{key: name}), expected)
    encoded = ask(output_dtype=name, encoding_format="base64")
    np.testing.assert_array_equal([np.frombuffer(base64.b64decode(each), expected.dtype) for each in encoded], expected)
    several = ask(embedding_type=[name, "float"])
    np.testing.assert_array_equal([each[name] for each in several], expected)
    np.testing.assert_array_equal([each["float"] for each in several], ask())
    if (other := {"int8": "base64_int8", "ubinary": "base64_binary"}.get(name)) is not None:
        assert ask(encoding_format=other) == encoded


def test_types_that_the_server_cannot_give_are_refused(embedding: Ask, tmp_path: Path) -> None:
    def refusal(ask: Ask, **keys: Any) -> str:
        status, said = ask("/v1/embeddings", {"input": T, **keys})
        assert status == 400, said
        return message_of(said)

    assert "--ranges FILE, the output of a job with --output-dtype int8" in refusal(embedding, output_dtype="int8")
    assert "--ranges FILE" in refusal(embedding, encoding_format="base64_int8")
    both = refusal(embedding, output_dtype="binary", encoding_format="ubinary")
    assert "encoding_format names the type ubinary, and output_dtype the type binary" in both
    assert "encoding_format has no format" in refusal(embedding, encoding_format=[])
    assert "output_dtype" in refusal(embedding, output_dtype="int4")
    np.save(tmp_path / "ranges.npy", np.array([[0] * 4, [9] * 4], np.float32))
    bundle = open_bundle(make_bundle(tmp_path / "bundle"))

    def served(ranges: str) -> Any:
        return application(bundle, Session(bundle, RecordingRunner()), ServeOptions(), ranges=ranges)

    def ranged(path: str, body: Any) -> tuple[int, Any]:
        return asked(served(str(tmp_path / "ranges.npy")), path, body)

    for change in ({"dimensions": 2}, {"normalize": True}):
        message = refusal(ranged, output_dtype="uint8", **change)
        assert "ranges of uint8 are of the bundle's own embeddings of 4 dimensions" in message
    with pytest.raises(InputError, match="There is no file"):
        served("nothing.npy")


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


def test_a_ranking_says_which_documents_were_truncated(reranking: Any) -> None:
    ask, session = reranking
    long, query = " ".join(["w7"] * 100), {"query": "w1"}
    pair = {"truncated": True, "tokens_used": session.max_seq_length, "tokens_given": 104}
    names = {"index", "relevance_score", "score"}

    def extra(**body: Any) -> list[dict[str, Any]]:
        status, said = ask("/rerank", query | body)
        assert status == 200, said
        results = said if isinstance(said, list) else said.get("results") or said["data"]
        by_index = sorted(results, key=lambda result: result["index"])
        assert isinstance(said, list) or ("truncated_inputs" in said["usage"]) == any(by_index[-1].keys() - names)
        return [{key: each[key] for key in each.keys() - names} for each in by_index]

    for name in ("documents", "texts"):
        assert extra(**{name: ["w8", long]}) == [{}, pair]
    assert extra(documents=["w8", long], truncation=True) == [{}, pair]
    assert extra(documents=["w8", long], max_tokens_per_doc=10) == [{}, pair | {"tokens_used": 14}]
    assert extra(documents=["w8", "w7"], max_tokens_per_doc=10) == [{}, {}]


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
            message = message_of(said)
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


def test_texts_and_ids_lose_their_start_where_a_request_asks_for_it(embedding: Ask) -> None:
    words = [WORDS[word] for word in LONG.split()]
    ids = [CLS, *words, SEP]
    for more in (
        {"truncate": "START"},
        {"truncate": "end", "truncation_side": "left"},
        {"truncation": True, "truncation_direction": "Left"},
        {"truncate": "split", "truncation_side": "left"},
    ):
        is_split = more["truncate" if "truncate" in more else "truncation"] == "split"
        expected = [vector(CLS, *words[-14:], SEP)]
        for given in (LONG, ids)[: 1 if is_split else 2]:
            found = vectors_of(embedding("/v1/embeddings", {"input": given} | more))
            assert np.allclose(found, expected, rtol=1e-6) != is_split
    by_end = vectors_of(embedding("/v1/embeddings", {"input": LONG, "truncate": "END"}))
    np.testing.assert_allclose(by_end, [vector(CLS, *words[:14], SEP)], rtol=1e-6)
    short = vectors_of(
        embedding("/v1/embeddings", {"input": LONG, "truncate_prompt_tokens": 5, "truncation_side": "left"})
    )
    np.testing.assert_allclose(short, [vector(CLS, *words[-3:], SEP)], rtol=1e-6)
    status, said = embedding("/v1/embeddings", {"input": LONG, "truncate": "END", "truncation_side": "left"})
    assert (status, "contradict each other" in message_of(said)) == (400, True)


# The server's default for long texts


def truncated(found: httpx2.Response) -> str | None:
    assert found.status_code == 200, found.text
    return found.headers.get("x-truncated-inputs")


def test_a_servers_default_for_long_texts_holds_where_a_request_says_nothing(tmp_path: Path) -> None:
    bundle, ids = open_bundle(make_bundle(tmp_path / "bundle")), [CLS, *[WORDS[word] for word in LONG.split()], SEP]
    texts = ["read", LONG, "long", LONG]

    def served(truncate: Any, *requests: tuple[str, Any]) -> list[httpx2.Response]:
        options = ServeOptions(truncate=truncate)
        options.check()
        return answers_of(application(bundle, Session(bundle, RecordingRunner()), options), *requests)

    by_route = ("/v1/embeddings", {"input": texts}), ("/embed", {"inputs": texts, "normalize": False})
    for default in (None, "error"):
        assert [found.status_code for found in served(default, *by_route, ("/", by_route[1][1]))] == [400] * 3
    of_requests = {
        key: served(None, ("/v1/embeddings", {"input": texts, "truncate": key}))[0] for key in ("end", "split")
    }
    for default, expected in of_requests.items():
        by_openai, by_tei = served(default, *by_route)
        assert by_openai.json() == expected.json()
        np.testing.assert_allclose(by_tei.json(), vectors_of((200, expected.json())), rtol=1e-6)
        told = "1,3" if default == "end" else None
        assert truncated(by_openai) == truncated(by_tei) == truncated(expected) == told
    of_ids, refused, own, short, metrics = served(
        "end",
        ("/v1/embeddings", {"input": [ids, ids[:1] + ids[-1:]]}),
        ("/v1/embeddings", {"input": LONG, "truncate": "error"}),
        ("/v1/embeddings", {"input": LONG, "truncate": "split"}),
        ("/v1/embeddings", {"input": "read"}),
        ("/metrics", None),
    )
    assert [truncated(each) for each in (of_ids, own, short)] == ["0", None, None]
    assert refused.status_code == 400
    (of_long_ids,) = served("split", ("/v1/embeddings", {"input": ids}))
    assert of_long_ids.status_code == 400
    assert message_of(of_long_ids.json()).endswith('send "truncate": "end".'), "ids cannot be split"
    assert 'hdexport_truncated_texts_total{model="tiny",route="/v1/embeddings"} 1.0' in metrics.text


def test_an_answer_says_which_inputs_were_truncated_and_to_how_many_tokens(tmp_path: Path) -> None:
    bundle, ids = open_bundle(make_bundle(tmp_path / "bundle")), [CLS, *[WORDS[word] for word in LONG.split()], SEP]
    very_long = LONG * 1000

    def answered(**body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        app = application(bundle, Session(bundle, RecordingRunner()), ServeOptions())
        (found,) = answers_of(app, ("/v1/embeddings", body))
        said = found.json()
        assert (truncated(found) is None) == ("truncated_inputs" not in said["usage"])
        extra = [{key: each[key] for key in each.keys() - {"object", "index", "embedding"}} for each in said["data"]]
        return said["usage"], extra

    usage, data = answered(input=["read", LONG, very_long], truncate="end")
    counted = {"truncated": True, "tokens_used": 16, "tokens_given": 27}
    assert data == [{}, counted, {"truncated": True, "tokens_used": 16}], "a very long text's tokens are not counted"
    assert usage == {"prompt_tokens": 3 + 16 + 16, "total_tokens": 35, "truncated_inputs": 2}
    assert answered(input=[ids, ids[:1] + ids[-1:]], truncate="end")[1] == [counted, {}]
    assert answered(input=LONG, truncate_prompt_tokens=5)[1] == [counted | {"tokens_used": 5}]
    for body in ({"input": "read"}, {"input": LONG, "truncate": "split"}):
        assert answered(**body)[1] == [{}], body


@pytest.mark.parametrize("truncate", [None, "error", "end", "split"])
def test_a_servers_default_holds_for_rerank_and_classes_and_info_says_it(
    reranking: Any, reranker_bundle: Path, truncate: Any
) -> None:
    _, session = reranking
    bundle, long = open_bundle(reranker_bundle), " ".join(["w7"] * 100)
    requests = (
        ("/rerank", {"query": "w1", "documents": ["w8", long]}),
        ("/predict", {"inputs": ["w8", long]}),
        ("/rerank", {"query": "w1", "documents": ["w8", long], "truncate": "end"}),
        ("/info", None),
    )
    ranked, classes, own, info = answers_of(application(bundle, session, ServeOptions(truncate=truncate)), *requests)
    assert ranked.status_code == (400 if truncate == "error" else 200)
    assert classes.status_code == (200 if truncate in ("end", "split") else 400)
    assert truncated(own) == "1"
    if truncate != "error":
        assert truncated(ranked) == (None if truncate == "split" else "1")
    assert info.json()["auto_truncate"] == (truncate in (None, "end"))


def test_documents_that_are_cut_to_a_requests_own_number_of_tokens_are_said(
    reranking: Any, reranker_bundle: Path
) -> None:
    _, session = reranking
    body = {"query": "w1", "documents": ["w7 w8 w9", "w7", "w7 w8"], "max_tokens_per_doc": 2}
    for more, told in (
        ({}, "0"),
        ({"truncate": "error"}, "0"),
        ({"max_tokens_per_doc": 1}, "0,2"),
        ({"max_tokens_per_doc": 3}, None),
    ):
        app = application(open_bundle(reranker_bundle), session, ServeOptions())
        assert truncated(answers_of(app, ("/v1/rerank", body | more))[0]) == told


def test_an_unknown_default_for_long_texts_is_refused() -> None:
    with pytest.raises(InputError, match=r"truncate is 'END'; it must be one of error, end, split"):
        ServeOptions(truncate="END").check()  # type: ignore[arg-type]


def test_numbers_of_inputs_are_written_as_ranges_and_never_without_end() -> None:
    assert number_ranges({3, 0, 4, 5, 9}) == "0,3-5,9"
    written = number_ranges(range(0, 4096, 2))
    *shown, left = written.split(",")
    assert len(written) < 1100
    assert len(shown) + int(left.removeprefix("+")) == 2048


# Large bodies


BODIES = [
    *SENT.values(),
    ("/v1/embeddings", {"input": [CLS, 5, SEP], "truncate": "end"}),
    ("/v1/embeddings", {"input": [[CLS, 5, SEP], [CLS, 6, 7, SEP]]}),
    ("/v1/embeddings", {"input": [[CLS, 5, SEP], "read"]}),
    ("/v1/embeddings", {"input": [[], ["]]]]"]]}),
    ("/v1/embeddings", {"input": [1.5, [2], None, {"a": [3]}]}),
    ("/v1/embeddings", {"input": ["\u00e4", '"[,]\\', ""], "dimensions": 2}),
    ("/v1/embeddings", {"input": {"a": 5}}),
    ("/v1/embeddings", {"inputs": ["a"]}),
    ("/v1/contextualizedembeddings", {"inputs": [["a", "[b]]"], ["c"], [], "d[", ["e", "]]]]]]]]]]"]]}),
    ("/predict", {"inputs": [["w7", "w8"], "w9"]}),
    ("/rerank", {"query": "w1", "documents": [{"text": "w7"}, "w8"]}),
]


@pytest.mark.parametrize("spaces", [None, 1])
def test_a_large_body_is_read_as_a_small_one(spaces: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "LARGE_BYTES", 0)
    written = [
        (ROUTES[path.replace("/v1/r", "/r").replace("/v2/r", "/r")], json.dumps(body, indent=spaces))
        for path, body in BODIES
    ]
    written += [
        (ROUTES["/embed"], text)
        for text in ("[]", "{", '{"inputs": ["a}', '{"inputs": [,]}', '{"inputs": ["\\ud800"]}')
    ]
    for kind, text in written:
        found = []
        for read in (requests.read_values, functools.partial(requests.read_large_values, max_texts=9, max_ids=9)):
            try:
                found.append(repr(requests.body_of(read(text.encode()), kind)))
            except InputError as error:
                found.append(re.sub(r" \(byte \d+\)", "", str(error)))
        assert found[0] == found[1]


def test_a_list_that_is_too_long_is_refused_before_its_values_are_read() -> None:
    read = functools.partial(requests.read_large_values, max_texts=2048, max_ids=10**5)
    ids = ",".join(str(number) for number in range(10**5, 4 * 10**5))
    texts = ",".join(['"a, b"'] * 10**5)
    for given, message in (
        (f"[{ids}]", "input: The text has 300000 ids; at most 100000"),
        (f"[[1], [{ids}]]", r"input\[1\]: The text has 300000 ids"),
        (f"[{'[1],' * 10**5}[2]]", "There are 100001 texts in the request; 1 to 2048 fit"),
        (f"[{texts}]", "There are more than 2048 texts in the request; 1 to 2048 fit"),
        (f"[[{texts}]]", "There are more than 2048 texts in the request; 1 to 2048 fit"),
        (f"[{f'[{texts[: 7 * 1500 - 1]}],' * 40}[]]", "There are more than 2048 texts in the request; 1 to 2048 fit"),
        (f'[{{"data": [{texts}]}}]', "There are more than 2048 texts in the request; 1 to 2048 fit"),
        (f'[{{"ids": [[{ids}]]}}]', r"ids\[0\]: The text has 300000 ids"),
    ):
        content = f'{{"input": {given}}}'.encode()
        tracemalloc.start()
        try:
            with pytest.raises(InputError, match=message):
                read(content)
            assert tracemalloc.get_traced_memory()[1] < 5 * len(content), "read, it takes ten times as much"
        finally:
            tracemalloc.stop()


def test_ids_of_a_large_body_are_read_and_checked_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, int] = {}

    def noted(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*given: Any, **options: Any) -> Any:
            threads[name] = threading.get_ident()
            return real(*given, **options)

        monkeypatch.setattr(module, name, call)

    noted(request_reader, "read_large_values")
    noted(openai, "_texts_or_ids")
    bundle, ids = open_bundle(make_bundle(tmp_path / "bundle")), [CLS, *[5] * 60_000, SEP]
    app = application(bundle, Session(bundle, RecordingRunner()), ServeOptions(truncate="end"))
    body = {"input": [ids] * 3}
    assert len(json.dumps(body)) > requests.LARGE_BYTES
    assert truncated(answers_of(app, ("/v1/embeddings", body))[0]) == "0-2"
    assert set(threads) == {"read_large_values", "_texts_or_ids"}
    assert threading.get_ident() not in threads.values()
