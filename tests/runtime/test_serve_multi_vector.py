"""``POST /v1/multi-vector``: the embeddings of `MultiVectorEncoder`, in Jina's shape."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hdruntime import MultiVectorEncoder
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.serve import ServeOptions, application, embedding_types
from hdruntime.session import Session
from hdruntime.session import load as load_session
from hdruntime.text.embeddings import EmbeddingPrecision, normalized, quantized
from support.colbert_models import DOCUMENT_TOKENS, MAX_LEN, WIDTH, made_colbert
from support.serving import answers_of

PATH = "/v1/multi-vector"
TEXTS = ["What is read, and by whom?", "", "the (end).", "?!", "a"]
LONG = "Nobody reads twice; " * 30
ATOL = 1e-6

Ask = Callable[..., tuple[int, Any]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Of queries that are expanded, and documents whose punctuation is skipped."""
    return open_bundle(made_colbert(tmp_path_factory, "classic") / "bundle")


@pytest.fixture(scope="module")
def encoder(bundle: Bundle) -> Iterator[MultiVectorEncoder]:
    with MultiVectorEncoder(bundle, backend="onnxruntime") as encoder:
        yield encoder


@pytest.fixture(scope="module")
def session(bundle: Bundle) -> Iterator[Session]:
    with load_session(bundle, "onnxruntime", threads=1) as session:
        yield session


@pytest.fixture(scope="module")
def ask(bundle: Bundle, session: Session, encoder: MultiVectorEncoder, tmp_path_factory: Any) -> Ask:
    vectors = np.concatenate(encoder.encode_document(TEXTS))
    ranges: Path = tmp_path_factory.mktemp("ranges") / "ranges.npy"
    np.save(ranges, np.stack([vectors.min(axis=0), vectors.max(axis=0)]))

    def ask(path: str = PATH, *, options: dict[str, Any] | None = None, **body: Any) -> tuple[int, Any]:
        served = application(bundle, session, ServeOptions(**options or {}), ranges=str(ranges))
        (found,) = answers_of(served, (path, body))
        return found.status_code, found.json()

    return ask


def embeddings(answer: tuple[int, Any]) -> list[Any]:
    status, said = answer
    assert status == 200, said
    assert [(each["object"], each["index"]) for each in said["data"]] == [
        ("embeddings", index) for index in range(len(said["data"]))
    ]
    return [each["embeddings"] for each in said["data"]]


def assert_texts(found: list[Any], expected: list[np.ndarray]) -> None:
    assert list(map(len, found)) == list(map(len, expected))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.array(one).reshape(other.shape), other, rtol=0, atol=ATOL)


def test_queries_and_documents_are_an_encoders(ask: Ask, encoder: MultiVectorEncoder) -> None:
    documents, queries = encoder.encode_document(TEXTS), encoder.encode_query(TEXTS)
    answer = ask(model="any", input=TEXTS, input_type="document", embedding_type="float")
    assert_texts(embeddings(answer), documents)
    assert answer[1]["usage"]["total_tokens"] == sum(map(len, tokens_of(encoder, "document")))
    assert_texts(embeddings(ask(input=TEXTS)), documents)
    assert_texts(embeddings(ask(input=TEXTS, input_type="query")), queries)
    assert {len(each) for each in queries} == {encoder.query_length}, "queries are expanded"
    assert len(documents[3]) < len(queries[3]), "punctuation is skipped"
    assert_texts(embeddings(ask(input={"text": TEXTS[0], "id": "1"})), documents[:1])
    assert_texts(embeddings(ask(input=TEXTS[0])), documents[:1])


def tokens_of(encoder: MultiVectorEncoder, task: str) -> list[np.ndarray]:
    """The tokens of each text, without padding."""
    arrays = encoder.preprocess(TEXTS, prompt=encoder.prompts[task], task=task)
    return [ids[mask > 0] for ids, mask in zip(arrays["input_ids"], arrays["attention_mask"], strict=True)]


def test_long_texts_are_truncated_and_named(ask: Ask, bundle: Bundle, encoder: MultiVectorEncoder) -> None:
    answer = ask(input=["a", LONG])
    assert_texts(embeddings(answer), encoder.encode_document(["a", LONG]))
    assert answer[1]["data"][1]["truncated"] is True
    assert "truncated" not in answer[1]["data"][0]
    assert answer[1]["usage"]["truncated_inputs"] == 1
    assert_texts(embeddings(ask(input=[LONG], input_type="query")), encoder.encode_query([LONG]))
    for keys in ({"truncate": "error"}, {"truncate": "error", "input_type": "query"}):
        status, said = ask(input=["a", LONG], **keys)
        assert (status, "input[1]: The text has" in said["error"]["message"]) == (400, True)
    # In chunks, a document has a vector for every token; a query would be several queries.
    (whole,) = embeddings(ask(input=[LONG], truncate="split"))
    assert len(whole) > MAX_LEN
    for keys, options in (({"truncate": "split"}, {}), ({}, {"truncate": "split"})):
        assert_texts(
            embeddings(ask(input=["a"], input_type="query", options=options, **keys)), encoder.encode_query(["a"])
        )
        status, said = ask(input=[LONG], input_type="query", options=options, **keys)
        assert (status, '"truncate": "end"' in said["error"]["message"]) == (400, True)


def test_types_are_those_of_the_embeddings(ask: Ask, encoder: MultiVectorEncoder) -> None:
    documents = encoder.encode_document(TEXTS)
    shorter = [normalized(each[:, :8]) for each in documents]
    assert_texts(embeddings(ask(input=TEXTS, dimensions=8)), shorter)
    encoded = embeddings(ask(input=TEXTS, embedding_type="base64"))
    decoded = [[np.frombuffer(base64.b64decode(token), "<f4") for token in text] for text in encoded]
    assert_texts(decoded, documents)
    assert_texts(
        embeddings(ask(input=TEXTS, embedding_type="binary")),
        [quantized(each, EmbeddingPrecision.BINARY) for each in documents],
    )
    several = embeddings(ask(input=TEXTS, embedding_type=["float", "base64"]))
    assert_texts([each["float"] for each in several], documents)
    assert [each["base64"] for each in several] == encoded
    status, said = ask(input=TEXTS, embedding_type="int8", dimensions=8)
    assert (status, f"of {WIDTH} dimensions" in said["error"]["message"]) == (400, True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({}, "required field `input`"),
    "no text": ({"input": []}, "There are 0 texts"),
    "a side": ({"input": "a", "input_type": "passage"}, "input_type"),
    "ids": ({"input": [5, 6]}, "The body is not valid"),
    "an object with more": ({"input": [{"text": "a", "image": "b"}]}, "unknown field `image`"),
    "an object without text": ({"input": [{"id": "1"}]}, "The body is not valid"),
    "dimensions": ({"input": "a", "dimensions": WIDTH + 1}, f"these have {WIDTH}"),
}


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    """The bytes of a response that servers allow."""
    monkeypatch.setattr(ServeOptions, "max_response_bytes", lambda _: 2**14)
    return 2**14


@pytest.mark.parametrize(
    ("more", "value_bytes"),
    [({}, 22), ({"embedding_type": "base64"}, 16 / 3), ({"embedding_type": ["float", "base64"]}, 22 + 16 / 3)]
    + [({"embedding_type": kind}, size) for kind, size in (("int8", 5), ("ubinary", 4), ("base64_binary", 4))],
)
def test_the_limit_of_a_response_is_its_bytes(ask: Ask, limit: int, more: dict[str, Any], value_bytes: float) -> None:
    most, split = int(limit / WIDTH / value_bytes), more | {"truncate": "split"}
    status, said = ask(input=["a" * (most - 1), "a"], **split)
    assert status == 200, said
    assert len(json.dumps(embeddings((status, said)))) < limit
    status, said = ask(input=["a" * most, "a"], **split)
    message = said["error"]["message"]
    assert (status, f"The texts have up to {most + 1} tokens with {WIDTH} values each" in message) == (400, True)
    assert "it may have 0.0 MiB.\nSend fewer texts in a request" in message
    assert ('ask for "encoding_format": "base64"' in message) == (value_bytes >= 22)
    assert message.endswith("or start the server with a larger --max-response-mb.")


def test_the_largest_response_follows_the_option_and_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServeOptions(max_response_mb=3).max_response_bytes() == 3 * 2**20
    for free, most in ((None, 2**28), (2**40, 2**28), (12 * 2**20, 2**20)):
        monkeypatch.setattr("hdruntime.serve.options.free_bytes", lambda free=free: free)
        assert ServeOptions().max_response_bytes() == most


def test_parts_of_a_request_have_one_limit(ask: Ask, limit: int) -> None:
    text = "a" * (limit // 2 // WIDTH // 22)
    for parts, wanted in (([text] * 2, 200), ([text] * 2 + ["a" * 9], 400)):
        status, said = ask("/vertex", instances=parts, parameters={"truncate": "split"})
        assert (status, "it may have 0.0 MiB" in str(said)) == (wanted, wanted == 400)


def test_rows_in_another_thread_are_those_of_this_one(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"input": TEXTS, "embedding_type": ["float", "base64"]}
    expected, threads = ask(**body), set[int]()
    values = embedding_types.EmbeddingTypes._values

    def noted(*given: Any) -> Any:
        threads.add(threading.get_ident())
        return values(*given)

    monkeypatch.setattr(embedding_types, "_MANY_VALUES", 0)
    monkeypatch.setattr(embedding_types.EmbeddingTypes, "_values", noted)
    assert ask(**body) == expected
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_models_that_text_embeddings_inference_does_not_serve_have_no_pooling(bundle: Bundle, session: Session) -> None:
    (response,) = answers_of(application(bundle, session, ServeOptions()), ("/info", None))
    assert (response.status_code, "There is no route GET /info for models of token-similarity" in response.text) == (
        404,
        True,
    )


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_request_is_refused(case: str, ask: Ask) -> None:
    body, expected = REFUSED[case]
    status, said = ask(**body)
    assert (status, expected in said["error"]["message"]) == (400, True), said


def test_documents_have_the_servers_length(bundle: Bundle, ask: Ask) -> None:
    with (
        MultiVectorEncoder(bundle, document_length=DOCUMENT_TOKENS + 9, backend="onnxruntime") as encoder,
        load_session(bundle, "onnxruntime", threads=1, max_seq_length=DOCUMENT_TOKENS + 9) as session,
    ):
        (found,) = answers_of(application(bundle, session, ServeOptions()), (PATH, {"input": [LONG]}))
        assert_texts(embeddings((found.status_code, found.json())), encoder.encode_document([LONG]))


def test_hosting_platforms_get_a_vector_for_each_token(ask: Ask, bundle: Bundle, encoder: MultiVectorEncoder) -> None:
    documents, queries = encoder.encode_document(TEXTS), encoder.encode_query(TEXTS)
    assert_texts(ask("/invocations", inputs=TEXTS)[1], documents)
    assert_texts(ask("/invocations", inputs=TEXTS, prompt_name="query")[1], queries)
    assert_texts([ask("/", inputs=TEXTS[0])[1]], documents[:1])
    found = ask("/vertex", instances=TEXTS, parameters={"prompt_name": "query"})
    assert_texts(found[1]["predictions"], queries)
    tensor = {"name": "TEXT", "shape": [len(TEXTS)], "datatype": "BYTES", "data": TEXTS}
    path = f"/v2/models/{bundle.manifest.name}/infer"
    for parameters, expected in (({}, documents), ({"prompt_name": "query"}, queries)):
        (output,) = ask(path, inputs=[tensor], parameters=parameters)[1]["outputs"]
        assert_texts([json.loads(each) for each in output["data"]], expected)
    assert ask(path, inputs=[tensor], parameters={"prompt_name": "passage"})[0] == 400
    assert ask("/invocations", inputs=TEXTS, prompt_name="passage")[0] == 400
