"""The server: the answers of a session, by the clients and in the forms of others; limits, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import uvicorn
from huggingface_hub import InferenceClient

import hdruntime
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import HdexportError, InputError
from hdruntime.serve import ServeOptions, application, serve
from hdruntime.serve.admission import OverloadedError
from hdruntime.serve.queue import TextQueue
from hdruntime.serve.request_body import LARGE_BYTES
from hdruntime.serve.server import bound_sockets
from hdruntime.tasks.task import Pairs, Text
from hdruntime.tasks.text_classification import TextClassification
from support.job_runs import gather_bundle
from support.serving import PARSERS, Connection, message_of, protocol_of
from support.splade_models import made_splade
from support.tiny_bundle import WORDS
from support.waiting import wait_until

TEXTS = ["What is read, and by whom?", "Museums! " * 40, "a", "Nobody reads twice; " * 5]
KEY = "a secret key"


@contextlib.contextmanager
def served(bundle: Path, parser: str = "", **options: Any) -> Iterator[tuple[httpx2.Client, hdruntime.Session]]:
    """A client of a server in this process, with a parser or uvicorn's choice, and the server's session.

    Clients of plain HTTP read no certificates, which takes as long as ten answers.
    """
    with hdruntime.load(bundle, "onnxruntime", threads=1) as session:
        app = application(open_bundle(bundle), session, ServeOptions(**options))
        protocol = protocol_of(parser) if parser else "auto"
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False, http=protocol))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, verify=False) as client:
                yield client, session
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def embedder(sample_bundle: Path) -> Iterator[tuple[httpx2.Client, hdruntime.Session]]:
    with served(sample_bundle, max_texts=64, max_body_mb=1) as both:
        yield both


def test_openais_client_gets_the_sessions_vectors(embedder: Any) -> None:
    client, session = embedder
    theirs = openai.OpenAI(base_url=f"{str(client.base_url).rstrip('/')}/v1", api_key="none")
    expected = session.embed(TEXTS)
    # The client asks for base64 unless it is told otherwise.
    for encoding in ({}, {"encoding_format": "float"}):
        found = theirs.embeddings.create(model="any", input=TEXTS, **encoding)
        np.testing.assert_allclose([each.embedding for each in found.data], expected, atol=1e-6)
        assert [each.index for each in found.data] == [*range(len(TEXTS))]
        assert found.usage.total_tokens == sum(len(each) for each in session.tokenize(TEXTS))
    alone = theirs.embeddings.create(model="any", input=TEXTS[0])
    assert np.array_equal(np.array(alone.data[0].embedding, np.float32), session.embed(TEXTS[:1])[0]), "to the last bit"
    ids = [each.input_ids for each in session.tokenize(TEXTS[:2])]
    by_ids = theirs.embeddings.create(model="any", input=ids)
    np.testing.assert_allclose([each.embedding for each in by_ids.data], expected[:2], atol=1e-6)
    short = theirs.embeddings.create(model="any", input=TEXTS[0], dimensions=9).data[0].embedding
    np.testing.assert_allclose(short, expected[0, :9] / np.linalg.norm(expected[0, :9]), atol=1e-6)
    long = "What is read? " * session.max_len
    end = theirs.embeddings.create(model="any", input=["a", long], extra_body={"truncate": "end"})
    assert [getattr(each, "truncated", False) for each in end.data] == [False, True]
    assert end.usage.to_dict()["truncated_inputs"] == 1
    with pytest.raises(openai.BadRequestError, match="truncated to 1000 dimensions"):
        theirs.embeddings.create(model="any", input="a", dimensions=1000)
    assert [model.id for model in theirs.models.list()] == [session.manifest.name]


def test_long_texts_are_refused_cut_or_split_and_chunks_see_each_other(embedder: Any) -> None:
    client, session = embedder
    long = "What is read, and by whom? " * session.max_len

    def vectors(**body: Any) -> Any:
        answer = client.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        return np.array([each["embedding"] for each in answer.json()["data"]], np.float32)

    refused = client.post("/v1/embeddings", json={"input": ["a", long]})
    assert refused.status_code == 400
    assert "input[1]: The text has" in message_of(refused.json())
    assert 'send "truncate": "end", or run it in chunks: send "truncate": "split"' in message_of(refused.json())
    first, last = session.tokenizer.special_ids
    for inside, remedy in (([5] * session.max_len, 'send "truncate": "end".'), ([10**6], None)):
        given = first + inside + last
        said = message_of(client.post("/v1/embeddings", json={"input": given}).json())
        assert remedy in said if remedy else "truncate" not in said, "each remedy works, and none is for other errors"
    for truncate, overflow in (("end", "truncate"), ("split", "split")):
        expected = session.embed([long], overflow=overflow)
        np.testing.assert_allclose(vectors(input=long, truncate=truncate), expected, atol=1e-6)
        embedded = client.post("/embed", json={"inputs": long, "truncate": truncate}).json()
        np.testing.assert_allclose(embedded, expected, atol=1e-6)
    chunks = ["Berlin is a city.", "It has 3.8 million people."]
    spans = [(0, 17), (18, 44)]
    expected = session.embed_chunks(" ".join(chunks), chunks=spans).vectors
    np.testing.assert_allclose(vectors(input=chunks, late_chunking=True), expected, atol=1e-6)
    assert np.abs(expected - session.embed(chunks)).max() > 0.01
    embedded = client.post("/embed", json={"inputs": TEXTS}).json()
    np.testing.assert_allclose(embedded, session.embed(TEXTS), atol=1e-6)


def test_a_reranker_answers_as_cohere_jina_and_text_embeddings_inference(reranker_bundle: Path) -> None:
    documents = ["w7 w8", "w9 " * 30, "w10"]
    with served(reranker_bundle) as (client, session):
        expected = session.rank("w1 w2", documents, overflow="truncate")
        places, scores = ([each[key] for each in expected] for key in ("corpus_id", "score"))
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            objects = [{"text": text} for text in documents]
            objects[1]["title"] = "a title"
            body = {"query": "w1 w2", "documents": [documents[0], objects[1], documents[2]]}
            found = client.post(path, json=body | {"return_documents": True}).json()
            assert [each["index"] for each in found["results"]] == places
            np.testing.assert_allclose([each["relevance_score"] for each in found["results"]], scores, atol=1e-6)
            assert [each["document"] for each in found["results"]] == [objects[place] for place in places]
            assert len(client.post(path, json=body | {"top_n": 1}).json()["results"]) == 1
        listed = client.post("/rerank", json={"query": "w1 w2", "texts": documents, "return_text": True}).json()
        assert [(each["index"], each["text"]) for each in listed] == [(place, documents[place]) for place in places]
        np.testing.assert_allclose([each["score"] for each in listed], scores, atol=1e-6)
        for wrong in ({"documents": []}, {"documents": documents, "top_n": -1}, {"documents": documents, "top_n": 0}):
            assert client.post("/rerank", json={"query": "a"} | wrong).status_code == 400, wrong


def test_a_text_alone_is_refused_where_the_model_compares_two(
    reranker_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = TextClassification(open_bundle(reranker_bundle))
    task.pairs = Pairs.REQUIRED
    monkeypatch.setattr("hdruntime.serve.running_model.served_task", lambda bundle: task)
    with served(reranker_bundle) as (client, _):
        for inputs in ("w7", ["w7"], ["w7", "w8"], ["w7", "w8", "w9"], [["w7", "w8"], ["w9"]]):
            refused = client.post("/predict", json={"inputs": inputs})
            assert (refused.status_code, '[["...", "..."]]' in message_of(refused.json())) == (400, True)
        for number in (1, 2, 3):
            answers = client.post("/predict", json={"inputs": [["w7", "w8"]] * number}).json()
            assert [len(each) for each in answers] == [1] * number


def test_classes_and_sparse_vectors_are_those_of_a_session(
    tiny_bundles: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bundle = tiny_bundles("bert", "text-classification").path
    with served(bundle) as (client, session):
        logits = session.infer(session.tokenize(["w7 w8"]))[0]["logits"]
        (found,) = client.post("/predict", json={"inputs": ["w7 w8"]}).json()
        best = np.exp(logits - logits.max())
        expected = dict(zip(session.manifest.labels, best / best.sum(), strict=True))
        assert [each["label"] for each in found] == sorted(expected, key=lambda label: -expected[label])
        np.testing.assert_allclose([each["score"] for each in found], sorted(expected.values())[::-1], atol=1e-5)
        assert client.post("/predict", json={"inputs": "w7 w8"}).json() == found
        for number in (1, 2, 3, 5):
            texts = ["w7 w8", "w9", "w1 w2 w3", "w4", "w5"][:number]
            listed = client.post("/predict", json={"inputs": texts}).json()
            assert listed == [client.post("/predict", json={"inputs": text}).json() for text in texts]
        raw = client.post("/predict", json={"inputs": "w7 w8", "raw_scores": True}).json()
        np.testing.assert_allclose([each["score"] for each in raw], sorted(logits)[::-1], atol=1e-5)
        theirs = InferenceClient(str(client.base_url))
        classes = theirs.text_classification("w7 w8")
        assert [(each.label, each.score) for each in classes] == [(each["label"], each["score"]) for each in found]
        (best_class,) = theirs.text_classification("w7 w8", top_k=1, function_to_apply="none")
        assert (best_class.label, best_class.score) == (raw[0]["label"], raw[0]["score"])
        assert client.post("/", json={"inputs": ["w7 w8", "w9"]}).json()[0] == found
        refused = client.post("/", json={"inputs": "w7", "parameters": {"top_k": 0}})
        assert (refused.status_code, "1 or more" in refused.text) == (400, True)
        assert len(client.post("/predict", json={"inputs": [["w7", "w8"], "w9"]}).json()) == 2
        assert client.post("/rerank", json={}).status_code == 404, "three classes rank nothing"
    with served(made_splade(tmp_path_factory, "max") / "bundle") as (client, session):
        (vector,) = session.embed_sparse(TEXTS[:1])
        (found,) = client.post("/embed_sparse", json={"inputs": TEXTS[0]}).json()
        assert client.post("/", json={"inputs": TEXTS[0]}).json() == [found]
        assert client.get("/info").json()["model_type"] == {"embedding": {"pooling": "splade"}}
        assert {each["index"]: each["value"] for each in found} == pytest.approx(
            dict(zip(vector.indices.tolist(), vector.values.tolist(), strict=True)), abs=1e-5
        )
        for unknown in ("dimensions", "normalize"):
            refused = client.post("/embed_sparse", json={"inputs": "a", unknown: 5})
            assert f"unknown field `{unknown}`" in message_of(refused.json())


BAD: dict[str, tuple[str, Any, int, str]] = {
    "no JSON": ("/v1/embeddings", b"{", 400, "not valid"),
    "not UTF-8": ("/v1/embeddings", b'{"input": "\xff"}', 400, "it has the byte 0xff at byte 11.\nEncode the JSON"),
    "half a character": ("/v1/embeddings", rb'{"input": "\\ud800 \ud800"}', 400, r"has \ud800 at byte 19: half of a"),
    "half a character in a large body": (
        "/v1/embeddings",
        b'{"input": ["' + b"a" * LARGE_BYTES + rb'", "\ud83d\ude00 \uDC00"]}',
        400,
        rf"has \uDC00 at byte {LARGE_BYTES + 29}: half of a",
    ),
    "half an escape": ("/v1/embeddings", rb'{"input": "\ud8', 400, "The body is not valid"),
    "no input": ("/v1/embeddings", {}, 400, "required field `input`"),
    "a number": ("/v1/embeddings", {"input": 5}, 400, "neither a text"),
    "nothing": ("/v1/embeddings", {"input": []}, 400, "neither a text"),
    "an unknown key": ("/v1/embeddings", {"input": "a", "task": "retrieval.query"}, 400, "unknown field `task`"),
    "a side": ("/v1/embeddings", {"input": "a", "truncation_direction": "Middle"}, 400, "truncation_side"),
    "texts and ids": ("/v1/embeddings", {"input": ["a", 5]}, 400, "neither a text"),
    "an id that is none": ("/v1/embeddings", {"input": [101, 10**6, 102]}, 400, "input[0]"),
    "true as an id": ("/v1/embeddings", {"input": [True]}, 400, "neither a text"),
    "a truncation": ("/v1/embeddings", {"input": "a", "truncate": "middle"}, 400, "Invalid enum value"),
    "a prompt": ("/v1/embeddings", {"input": "a", "prompt_name": "nobody"}, 400, "is 'nobody'; it must be one of"),
    "many texts": ("/v1/embeddings", {"input": ["a"] * 65}, 400, "1 to 64 fit"),
    "many of no kind": ("/v1/embeddings", {"input": ["a"] * 65 + [5]}, 400, "1 to 64 fit"),
    "a large body": ("/v1/embeddings", {"input": "a" * 2**21}, 413, "more than 1048576 bytes"),
    "half of a pair": ("/v1/embeddings", b'{"input": "\\ud800"}', 400, ""),
    "many chunks": ("/v1/embeddings", {"input": ["a"] * 65, "late_chunking": True}, 400, "1 to 64 fit"),
    "ids in chunks": (
        "/v1/embeddings",
        {"input": [[101, 5, 102]], "late_chunking": True},
        400,
        "late_chunking reads texts",
    ),
    "deep": ("/v1/embeddings", b"[" * 100_000, 400, "not valid"),
    "no body": ("/v1/embeddings", b"", 400, "The body is empty"),
    "a key without end": ("/v1/embeddings", {"input": "a", "k" * 10_000: 1}, 400, "unknown field `kkk"),
    "a path": ("/nowhere", {}, 404, "POST /v1/embeddings"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_in_openais_form(embedder: Any, name: str) -> None:
    path, body, status, message = BAD[name]
    client, _ = embedder
    answer = client.post(path, content=body if isinstance(body, bytes) else json.dumps(body))
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert len(error["message"]) < 5000
    assert "Traceback" not in answer.text
    assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 200


def test_random_bodies_end_nothing(embedder: Any) -> None:
    client, _ = embedder
    choose = random.Random(5)
    whole = json.dumps({"input": TEXTS, "truncate": "end", "dimensions": 8, "late_chunking": False}).encode()
    for _ in range(300):
        body = bytearray(whole)
        for _ in range(choose.randint(1, 8)):
            body[choose.randrange(len(body))] = choose.randrange(256)
        assert client.post("/v1/embeddings", content=bytes(body)).status_code in (200, 400)


def test_a_text_that_is_read_whole_has_a_limit_and_one_that_is_cut_has_none(sample_bundle: Path) -> None:
    with served(sample_bundle, max_text_characters=1) as (client, session):
        long = "read " * (4 * session.max_len + 1000)
        cut = client.post("/v1/embeddings", json={"input": long, "truncate": "end"})
        np.testing.assert_allclose(
            [cut.json()["data"][0]["embedding"]], session.embed([long], overflow="truncate"), atol=1e-6
        )
        for body in ({"input": long, "truncate": "split"}, {"input": [long, "a"], "late_chunking": True}):
            refused = client.post("/v1/embeddings", json=body)
            assert refused.status_code == 400
            assert "can be tokenized in full" in message_of(refused.json())


def test_a_key_is_asked_for_where_there_is_one(sample_bundle: Path) -> None:
    with served(sample_bundle, api_key=KEY) as (client, _):
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": f"Bearer {KEY[:-1]}"},
            {"Authorization": KEY},
        ):
            refused = client.post("/v1/embeddings", json={"input": "a"}, headers=headers)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
            assert client.get("/metrics", headers=headers).status_code == 401
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        given = {"Authorization": f"Bearer {KEY}"}
        assert client.post("/v1/embeddings", json={"input": "a"}, headers=given).status_code == 200


def test_clients_beside_each_other_get_the_answers_that_they_get_alone(embedder: Any) -> None:
    client, session = embedder
    choose = random.Random(7)
    texts = ["w " * choose.randint(1, session.max_len // 4) for _ in range(60)]
    expected = session.embed(texts)

    def ask(text: str) -> Any:
        with httpx2.Client(base_url=client.base_url, timeout=60, verify=False) as own:
            return own.post("/v1/embeddings", json={"input": text}).json()["data"][0]["embedding"]

    with ThreadPoolExecutor(16) as pool:
        found = np.array([*pool.map(ask, texts)], np.float32)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    metrics = client.get("/metrics").text
    for line in (
        "hdexport_requests_total{",
        "hdexport_batch_texts_sum",
        f'hdexport_queue_tokens{{model="{session.manifest.name}"}} 0.0',
        "process_resident",
    ):
        assert line in metrics


@pytest.mark.parametrize("parser", PARSERS)
def test_clients_that_go_take_their_texts_with_them(sample_bundle: Path, parser: str) -> None:
    """Killed in the middle, half open, or slow with their body: others are answered, and nothing waits at the end."""
    body = json.dumps({"input": ["w " * 200] * 60, "truncate": "end"}).encode()
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
    with served(sample_bundle, parser, timeout=2) as (client, session):
        address = (client.base_url.host, client.base_url.port)
        gone = [socket.create_connection(address) for _ in range(12)]
        for number, each in enumerate(gone):
            # Whole requests; a beginning of one; a head and half of its body.
            sent = (head % len(body) + body, b"POST /v1/emb", head % len(body) + body[:100])[number % 3]
            each.sendall(sent)
        for each in gone[::3]:
            each.close()
        # Another client, for whom there is time.
        answer = client.post("/v1/embeddings", json={"input": "a"}, headers={"X-Forwarded-For": "192.0.2.1"})
        assert answer.status_code == 200
        np.testing.assert_allclose(answer.json()["data"][0]["embedding"], session.embed(["a"])[0], atol=1e-6)
        for _ in range(200):
            metrics = client.get("/metrics").text
            # Those that went, and those whose body never came.
            is_over = re.search(r'route="/v1/embeddings",status="503"} 4\.0', metrics)
            if f'hdexport_queue_tokens{{model="{session.manifest.name}"}} 0.0' in metrics and is_over:
                break
            time.sleep(0.05)
        else:
            raise AssertionError(metrics)
        answered = sum(
            map(
                float,
                re.findall(
                    r'_requests_total{model=".*",route="/v1/embeddings",status="(?:200|429|499)"} (\S+)', metrics
                ),
            )
        )
        assert answered == 5, "each that was sent whole, and one that stayed"
        for each in gone:
            each.close()


def sent_by(app: Any, *, body: bytes | None) -> Any:
    """The status and content that an application sends by itself, without a lifespan; None: it is cut off."""
    sent: list[Any] = []

    async def asked() -> None:
        waits = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if body is None or waits.is_set():
                waits.set()
                await asyncio.Event().wait()
            waits.set()
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/embeddings", "query_string": b"", "headers": []}
        answered = asyncio.create_task(app(scope, receive, send))
        await waits.wait()
        if body is None:
            answered.cancel()
        await answered

    asyncio.run(asked())
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_a_request_that_the_servers_end_cuts_off_gets_an_error_in_openais_form(
    embedder: Any, sample_bundle: Path
) -> None:
    app = application(open_bundle(sample_bundle), embedder[1], ServeOptions())
    status, said = sent_by(app, body=None)
    assert (status, said["error"]["type"]) == (503, "server_error")


def test_an_application_that_is_mounted_in_another_answers(embedder: Any, sample_bundle: Path) -> None:
    app = application(open_bundle(sample_bundle), embedder[1], ServeOptions(timeout=5))
    status, found = sent_by(app, body=b'{"input": "a"}')
    assert status == 200, found
    np.testing.assert_allclose(found["data"][0]["embedding"], embedder[1].embed(["a"])[0], atol=1e-6)


# The queue by itself


LARGE = " " * 2**17
"""Makes a text of a few tokens one that is tokenized alone, and slowly."""

SLOW = " " * 2**12
"""The same, among short ones."""


class Inference:
    """A `TextInference` whose texts are numbers of tokens, and which waits to be let go."""

    max_tokens = 1
    """Nothing follows from a text's characters."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go, self.has_read = threading.Event(), threading.Event()
        self.in_work = self.most_in_work = 0
        self.fails: Exception | None = None

    def encode(self, texts: list[Text]) -> list[Any]:
        if any(text.text.endswith(SLOW) for text in texts):
            assert self.has_read.wait(20)
        self.in_work += len(texts)
        self.most_in_work = max(self.most_in_work, self.in_work)
        return [
            SimpleNamespace(text=text, error=None, encoding=SimpleNamespace(chunks=[range(int(text.text))]))
            for text in texts
        ]

    def run_chunks(self, chunks: list[Any]) -> None:
        assert self.go.wait(20)
        self.batches.append([len(chunk.encoding) for chunk in chunks])
        self.in_work -= len(chunks)
        if self.fails is not None:
            raise self.fails


def in_queue(story: Callable[[TextQueue, Inference, Callable[..., Any]], Any], **options: Any) -> Inference:
    """Run a coroutine with a queue, and with a function that asks: (client, number of tokens...)."""

    async def told() -> None:
        queue = TextQueue(**{"batch_tokens": 100, "max_tokens": 1000, "max_wait_s": 0.0} | options)
        running = asyncio.create_task(queue.run())

        def ask(client: str, *tokens: int) -> asyncio.Task[Any]:
            end = {"large": LARGE, "slow": SLOW}.get(client, "")
            texts = [Text(text=str(each) + end) for each in tokens]
            return asyncio.create_task(queue.answer(inference, "task", texts, client=client))  # type: ignore[arg-type]

        try:
            await story(queue, inference, ask)
        finally:
            inference.go.set()
            running.cancel()
            queue.close()

    inference = Inference()
    asyncio.run(told())
    return inference


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never was")


def test_clients_take_turns_and_lengths_share_no_batch_with_others() -> None:
    async def story(queue: TextQueue, inference: Inference, ask: Any) -> None:
        first = ask("one", 500)
        await until(lambda: inference.in_work == 1 and not queue.tokens)
        asked = [ask("one", 300, 310, 320, 300), ask("two", 900), ask("two", 290), ask("three", 270)]
        await until(lambda: queue.tokens == 300 + 310 + 320 + 300 + 900 + 290 + 270)
        inference.go.set()
        await asyncio.gather(first, *asked)

    batches = in_queue(story, batch_tokens=1000, max_tokens=10_000).batches
    assert batches[0] == [500]
    # The client whose turn it is first, the other clients' texts of about that length with its own, and 1000 tokens
    # are enough.
    assert batches[1] == [300, 290, 270, 310]
    assert sorted(batches[2:]) == [[320, 300], [900]]


def test_texts_wait_a_moment_for_others_and_no_longer_when_a_batch_is_full() -> None:
    async def story(queue: TextQueue, inference: Inference, ask: Any) -> None:
        inference.go.set()
        began = time.monotonic()
        await asyncio.gather(ask("one", 20), ask("two", 21))
        assert time.monotonic() - began >= 0.2
        await asyncio.wait_for(asyncio.gather(ask("one", 60), ask("two", 61)), 20)

    batches = in_queue(story, max_wait_s=0.2).batches
    assert batches == [[20, 21], [60, 61]]


def test_a_full_queue_refuses_and_a_call_that_is_cancelled_leaves_it() -> None:
    async def story(queue: TextQueue, inference: Inference, ask: Any) -> None:
        first = ask("one", 10)
        await until(lambda: inference.in_work == 1 and not queue.tokens)
        waiting = ask("other", 500, 480)
        await until(lambda: queue.tokens == 980)
        with pytest.raises(OverloadedError, match="Too many tokens wait"):
            await ask("two", 30)
        waiting.cancel()
        inference.go.set()
        await first
        assert (await ask("two", 1001))[0].error is None, "an empty queue takes a call of any size"
        assert queue.tokens == 0

    assert in_queue(story).batches == [[10], [1001]]


def test_a_short_text_waits_for_no_long_one_that_is_tokenized() -> None:
    async def story(queue: TextQueue, inference: Inference, ask: Any) -> None:
        inference.go.set()
        large = ask("large", 10)
        await asyncio.gather(ask("one", 20), ask("two", 21))
        assert not large.done()
        inference.has_read.set()
        await large

    assert in_queue(story).batches[-1] == [10]


def test_the_shortest_texts_wait_for_no_thread_that_tokenizes() -> None:
    async def story(queue: TextQueue, inference: Inference, ask: Any) -> None:
        inference.go.set()
        slow = [ask(client, 10) for client in ("large", "slow", "slow", "slow")]
        await asyncio.gather(ask("one", 20), ask("two", 21))
        assert not any(each.done() for each in slow)
        inference.has_read.set()
        await asyncio.gather(*slow)

    assert len([text for batch in in_queue(story).batches for text in batch]) == 6


def test_of_a_large_call_two_windows_are_tokenized_ahead_and_all_texts_are_answered() -> None:
    async def story(queue: TextQueue, inference: Inference, ask: Any) -> None:
        inference.has_read.set()
        large = ask("large", *range(1, 9))
        await until(lambda: inference.in_work == 2)
        inference.go.set()
        assert [int(item.text.text) for item in await large] == [*range(1, 9)]

    inference = in_queue(story)
    assert sorted(each for batch in inference.batches for each in batch) == [*range(1, 9)]
    assert inference.most_in_work == 2, "one that waits or runs, and the next"


class Steps:
    """An event that lets one batch go at a time."""

    def __init__(self) -> None:
        self._batches = threading.Semaphore(0)

    def wait(self, seconds: float) -> bool:
        return self._batches.acquire(timeout=seconds)

    def set(self, batches: int = 100) -> None:
        self._batches.release(batches)


def test_a_window_of_a_large_call_waits_for_room_in_the_queue() -> None:
    async def story(queue: TextQueue, inference: Inference, ask: Any) -> None:
        inference.go = go = Steps()  # type: ignore[assignment]
        inference.has_read.set()
        large = ask("large", 10, 600, 500)
        await until(lambda: inference.in_work == 2 and queue.tokens == 600)
        inference.has_read.clear()
        go.set(1)
        await until(lambda: queue.tokens == 0)
        other = ask("one", 900)
        await until(lambda: queue.tokens == 900)
        inference.has_read.set()
        await until(lambda: inference.in_work == 3)
        await asyncio.sleep(0.1)
        assert queue.tokens == 900, "the last window is tokenized, and has no room yet"
        go.set()
        await asyncio.gather(large, other)

    assert sorted(sum(batch) for batch in in_queue(story).batches) == [10, 500, 600, 900]


def test_a_call_that_is_cancelled_leaves_no_window_behind() -> None:
    async def story(queue: TextQueue, inference: Inference, ask: Any) -> None:
        inference.has_read.set()
        large = ask("large", *range(1, 9))
        await until(lambda: inference.in_work == 2)
        large.cancel()
        await until(large.done)
        inference.go.set()
        await ask("two", 21)
        assert queue.tokens == 0

    assert len(in_queue(story).batches) <= 2, "what ran, and the other client's"


def test_a_broken_session_is_an_error_of_the_calls_and_not_the_queues_end() -> None:
    async def story(queue: TextQueue, inference: Inference, ask: Any) -> None:
        inference.go.set()
        inference.fails = RuntimeError("broken")
        with pytest.raises(RuntimeError, match="broken"):
            await ask("one", 10, 11)
        inference.fails = None
        await ask("one", 12)

    assert in_queue(story).batches == [[10, 11], [12]]


# The command


@pytest.mark.parametrize("stop", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.nightly)])
def test_the_command_serves_until_it_is_stopped_and_answers_what_runs(
    sample_bundle: Path, tmp_path: Path, stop: signal.Signals
) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    command = ["serve", sample_bundle, "--port", 0, "--backend", "onnxruntime", "--api-key-file", tmp_path / "key"]
    arguments = [Path(sys.executable).with_name("hdexport"), *command, "--threads", 1, "--max-wait-ms", 3000]
    # A server ignores SIGHUP if it was ignored before, as in a suite that nohup runs.
    before = signal.signal(stop, signal.SIG_DFL)
    process = subprocess.Popen([*map(str, arguments)], stderr=subprocess.PIPE, text=True, env={**os.environ})
    signal.signal(stop, before)
    with process:
        try:
            assert process.stderr is not None
            url = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
            assert url is not None
            with httpx2.Client(base_url=url[0], headers={"Authorization": f"Bearer {KEY}"}) as client:
                for _ in range(200):
                    with contextlib.suppress(httpx2.TransportError):
                        client.get("/health")
                        break
                    time.sleep(0.05)
                # Half of a request, which the end of the process does not wait for.
                half = Connection(client)
                half.send(b"POST /embed HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %b\r\n" % KEY.encode())
                half.send(b"Content-Length: 9\r\n\r\n{")
                with ThreadPoolExecutor(1) as pool:
                    # It waits for others, so that it runs when the server is stopped.
                    answer = pool.submit(
                        client.post, "/v1/embeddings", json={"input": "a text of a client"}, timeout=30
                    )
                    waits = re.compile(r"^hdexport_queue_tokens\S* [1-9]", re.MULTILINE)
                    wait_until(lambda: waits.search(client.get("/metrics").text) is not None)
                    process.send_signal(stop)
                    assert answer.result().status_code == 200
            assert b"body has not arrived" in half.answer().body
            # Far below the 30 seconds that requests have: only a guard.
            process.wait(20)
            said = process.stderr.read()
        finally:
            process.kill()
    assert process.returncode in (0, 143)
    assert "a text of a client" not in said
    assert "Traceback" not in said


def test_what_cannot_be_served_is_said(
    new_bundle: Any, sample_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, message in (
        ({"max_texts": 0}, "max_texts is 0; it must be 1 or more"),
        ({"api_key": " "}, "The API key is empty"),
        ({"max_wait_ms": -1}, "max_wait_ms is -1"),
        ({"max_wait_ms": float("nan")}, "max_wait_ms is nan"),
        ({"timeout": float("nan")}, "timeout is nan"),
        *(({"api_key": key}, "no header carries it") for key in ("one\ntwo", "key\n", "clé")),
    ):
        with pytest.raises(InputError, match=message):
            ServeOptions(**options).check()
    with pytest.raises(InputError, match="port is 65536; it must be 0 to 65535"):
        serve(tmp_path, options=ServeOptions(port=65536))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(HdexportError, match=rf"cannot listen on 127\.0\.0\.1, port {port}: .*\n.*another port"):
            serve(sample_bundle, options=ServeOptions(port=port), on_ready=lambda line: pytest.fail("it is not ready"))
    with pytest.raises(HdexportError, match=r"cannot listen on a\.\.b"), bound_sockets("a..b", 0):
        pass
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))

        def load(*given: Any, **options: Any) -> hdruntime.Session:
            other.listen()
            return hdruntime.load(*given, **options)

        monkeypatch.setattr("hdruntime.serve.server.load", load)
        options = ServeOptions(port=other.getsockname()[1])
        with pytest.raises(HdexportError, match=r"cannot listen on 127\.0\.0\.1"):
            serve(sample_bundle, options=options, on_ready=lambda line: pytest.fail("it is not ready"))
    with bound_sockets("localhost", 0) as sockets:
        places = {found[4][0] for found in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}
        assert {each.getsockname()[0] for each in sockets} == places, "every address of the name"
        assert len({each.getsockname()[1] for each in sockets}) == 1
    bundle = open_bundle(gather_bundle(new_bundle(), "text-scoring", {"log_probabilities": np.zeros(len(WORDS))}))
    with hdruntime.load(bundle) as session, pytest.raises(InputError, match="error or end: texts of text-scoring are"):
        application(bundle, session, ServeOptions(truncate="split"))
