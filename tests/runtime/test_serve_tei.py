"""The interface of text-embeddings-inference: the model's facts, tokens, ``POST /``, and scores from 0 to 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from huggingface_hub import InferenceClient
from tokenizers import Tokenizer

import hdruntime
from hdruntime.bundle.reader import open_bundle
from hdruntime.serve import ServeOptions, application
from hdruntime.tasks.text_classification import TextClassification
from hdruntime.text.logits import Activation
from support.serving import answers_of, command, message_of

INFO = {
    "model_id": str,
    "model_sha": type(None),
    "model_dtype": str,
    "model_type": dict,
    "max_concurrent_requests": int,
    "max_input_length": int,
    "max_batch_tokens": int,
    "max_batch_requests": type(None),
    "max_client_batch_size": int,
    "auto_truncate": bool,
    "tokenization_workers": int,
    "version": str,
    "sha": type(None),
    "docker_label": type(None),
}
"""The fields of `Info` in text-embeddings-inference's router."""

TEXTS = ["What is read, and by whom? Ünïcode 漢字", "[SEP] in a text", ""]


@pytest.fixture(scope="module")
def embedder(sample_bundle: Path) -> Iterator[tuple[httpx2.Client, Any]]:
    """A client of a server of the sample model, and the library's tokenizer."""
    tokenizer = Tokenizer.from_file(str(next(sample_bundle.rglob("tokenizer.json"))))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    with command(sample_bundle, "--backend", "onnxruntime", "--threads", "1", "--max-texts", "64") as (client, _):
        yield client, tokenizer


def test_info_has_the_fields_of_text_embeddings_inference(embedder: Any) -> None:
    found = embedder[0].get("/info").json()
    assert {name: type(value) for name, value in found.items()} == INFO
    (model,) = embedder[0].get("/v1/models").json()["data"]
    assert (found["model_id"], found["max_input_length"]) == (model["id"], model["max_model_len"])
    assert (found["model_dtype"], found["model_type"]) == ("float32", {"embedding": {"pooling": "mean"}})
    assert (found["max_client_batch_size"], found["auto_truncate"], found["version"]) == (
        64,
        False,
        hdruntime.__version__,
    )


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_tokens_are_those_of_the_tokenizers_library_with_their_places(embedder: Any, add_special_tokens: bool) -> None:
    client, tokenizer = embedder
    more = {} if add_special_tokens else {"add_special_tokens": False}
    found = client.post("/tokenize", json={"inputs": TEXTS} | more).json()
    for text, tokens in zip(TEXTS, found, strict=True):
        expected = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        assert [token["id"] for token in tokens] == expected.ids
        for token, special, offsets in zip(tokens, expected.special_tokens_mask, expected.offsets, strict=True):
            assert set(token) == {"id", "text", "special", "start", "stop"}
            assert token["special"] is bool(special)
            assert (token["start"], token["stop"]) == ((None, None) if special else offsets)
            assert token["text"] == (tokenizer.id_to_token(token["id"]) if special else text[slice(*offsets)])
    assert client.post("/tokenize", json={"inputs": TEXTS[0]} | more).json() == found[:1]


def test_ids_are_decoded_as_the_tokenizers_library_decodes_them(embedder: Any) -> None:
    client, tokenizer = embedder
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    for more, skips in (({}, True), ({"skip_special_tokens": False}, False)):
        expected = [tokenizer.decode(each, skip_special_tokens=skips) for each in ids]
        assert client.post("/decode", json={"ids": ids} | more).json() == expected
        assert client.post("/decode", json={"ids": ids[0]} | more).json() == expected[:1]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {"inputs": []}, "1 to 64 fit"),
        ("/tokenize", {"inputs": ["a"] * 65}, "1 to 64 fit"),
        ("/tokenize", {"inputs": "a" * 2**21}, "larger --max-text-characters"),
        ("/tokenize", {"inputs": ["a" * 2**19] * 3}, "The request has 1572864 characters; at most 1048576"),
        ("/decode", {"ids": [[5] * 2**17] * 3}, "The request has 393216 ids; at most 262144"),
        (
            "/tokenize",
            {"inputs": "a", "prompt_name": "nobody"},
            'There is no prompt \'nobody\'.\nAvailable prompts: ["query", "document"]',
        ),
        ("/tokenize", {"input": "a"}, "unknown field `input`"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, "inputs.sentences has no text"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["a"] * 64}}, "1 to 64 fit"),
        ("/similarity", {"inputs": "a"}, "not valid"),
        ("/", {"inputs": {"source_sentence": "a"}}, "required field `sentences`"),
        (
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": ["a"]}, "parameters": {"truncate": "middle"}},
            "Invalid enum value",
        ),
        (
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": ["a"]}, "parameters": {"inputs": ["b"]}},
            "unknown field `inputs`",
        ),
        (
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": ["a"]}, "parameters": {"normalize": False}},
            "unknown field `normalize`",
        ),
        ("/decode", {"ids": [[5], [10**6]]}, "ids[1]: 1000000 is no id"),
        ("/decode", {"ids": [-1]}, "ids[0]: -1 is no id"),
        ("/decode", {"ids": [[5], 6]}, "neither a list of ids nor"),
        ("/decode", {"ids": [[5]] * 65}, "1 to 64 fit"),
        ("/decode", {"ids": "a"}, "not valid"),
    ],
)
def test_what_cannot_be_tokenized_or_decoded_is_refused(embedder: Any, path: str, body: Any, message: str) -> None:
    found = embedder[0].post(path, json=body)
    assert (found.status_code, found.json()["error_type"]) == (400, "Validation")
    assert message in message_of(found.json())


def test_hugging_faces_client_gets_vectors_from_the_servers_address_alone(embedder: Any) -> None:
    client, _ = embedder
    theirs = InferenceClient(str(client.base_url))
    for given in (TEXTS[0], TEXTS):
        expected = client.post("/embed", json={"inputs": given}).json()
        np.testing.assert_array_equal(theirs.feature_extraction(given), np.array(expected, np.float32))
    short = theirs.feature_extraction(TEXTS[0], truncate=True, truncation_direction="right", dimensions=8)
    assert short.shape == (1, 8)


def test_similarities_are_cosines_with_the_source(embedder: Any) -> None:
    client, _ = embedder
    source, *others = "A text to compare", *TEXTS[:2]
    vectors = np.array(client.post("/embed", json={"inputs": [source, *others]}).json())
    expected = vectors[1:] @ vectors[0]
    inputs = {"source_sentence": source, "sentences": others}
    for path, more in (
        ("/similarity", {}),
        ("/", {}),
        ("/similarity", {"parameters": {"truncate": True, "truncation_direction": "Left", "prompt_name": None}}),
    ):
        found = client.post(path, json={"inputs": inputs} | more).json()
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    short = client.post("/embed", json={"inputs": [source, *others], "dimensions": 8}).json()
    found = client.post("/similarity", json={"inputs": inputs, "parameters": {"dimensions": 8}}).json()
    np.testing.assert_allclose(found, np.array(short[1:]) @ np.array(short[0]), rtol=1e-5)
    assert not np.allclose(found, expected, rtol=1e-2)
    by_client = InferenceClient(str(client.base_url)).sentence_similarity(source, other_sentences=others)
    np.testing.assert_allclose(by_client, expected, rtol=1e-5)
    long = {"inputs": {"source_sentence": source, "sentences": ["a word " * 5000, source]}}
    assert client.post("/similarity", json=long).status_code == 400
    truncated = client.post("/similarity", json=long | {"parameters": {"truncate": True}})
    assert truncated.headers["x-truncated-inputs"] == "1", "input 0 is the source"
    assert truncated.json()[1] == pytest.approx(1)


def test_ids_are_embedded_as_their_texts(embedder: Any) -> None:
    client, tokenizer = embedder
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    for path, more in (("/embed", {}), ("/embed", {"normalize": False}), ("/embed_all", {}), ("/", {})):
        of_texts, of_ids, of_one = (
            client.post(path, json={"inputs": inputs} | more).json() for inputs in (TEXTS, ids, ids[0])
        )
        assert len(of_ids) == len(TEXTS)
        for text, found in zip(of_texts, of_ids, strict=True):
            np.testing.assert_allclose(found, text, atol=1e-6)
        assert of_one == [pytest.approx(np.array(of_ids[0]), abs=1e-6)]
    refused = client.post("/embed", json={"inputs": [ids[0][1:-1]]})
    assert (refused.status_code, "lack special tokens" in refused.json()["error"]) == (400, True)
    assert client.post("/embed", json={"inputs": ["a", [101, 102]]}).status_code == 400


def test_vectors_of_all_tokens_are_the_models(embedder: Any, sample_bundle: Path) -> None:
    client, _ = embedder
    with hdruntime.load(sample_bundle, "onnxruntime", threads=1) as session:
        expected = [each["last_hidden_state"] for each in session.infer(session.tokenize(TEXTS))]
    found = client.post("/embed_all", json={"inputs": TEXTS}).json()
    for text, vectors, states in zip(TEXTS, found, expected, strict=True):
        assert np.shape(vectors) == states.shape, text
        np.testing.assert_allclose(vectors, states, atol=1e-5)
    one = client.post("/embed_all", json={"inputs": TEXTS[0], "truncate": True, "truncate_prompt_tokens": 4})
    unit = client.post("/embed_all", json={"inputs": TEXTS, "normalize": True}).json()
    np.testing.assert_allclose([np.linalg.norm(each, axis=1) for each in unit[:1]], 1, rtol=1e-5)
    assert np.shape(one.json()) == (1, 4, expected[0].shape[1])
    assert one.headers["x-truncated-inputs"] == "0"


def test_a_server_under_a_path_answers_at_that_path(new_bundle: Callable[..., Path]) -> None:
    with command(new_bundle(), "--root-path", "/a/b") as (client, _):
        for path in ("/", "/a/b", "/a/b/", "/a/b/embed"):
            assert (
                client.post(path, json={"inputs": "read"}).json()
                == client.post("/embed", json={"inputs": "read"}).json()
            )
        assert InferenceClient(f"{client.base_url}/a/b").feature_extraction("read").shape == (1, 4)


def test_one_score_is_the_sigmoid_of_the_logit_whatever_the_models_activation(
    reranker_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = ["w7 w8", "w9", "w10"]
    bundle = open_bundle(reranker_bundle)
    texts, others = {"query": "w1 w2", "texts": documents}, {"query": "w1 w2", "documents": documents}
    pairs = {"inputs": [["w1 w2", each] for each in documents]}
    asked = [(path, texts) for path in ("/", "/rerank")]
    asked += [(path, others) for path in ("/rerank", "/v1/rerank", "/v2/rerank")]
    with hdruntime.load(bundle, "onnxruntime", threads=1) as session:
        logits = np.array([each["logits"][0] for each in session.infer(session.tokenize(["w1 w2"] * 3, documents))])
        for activation in Activation:
            task = TextClassification(bundle)
            task.activation = activation
            monkeypatch.setattr("hdruntime.serve.running_model.served_task", lambda _, task=task: task)
            app = application(bundle, session, ServeOptions())
            sigmoid, own = 1 / (1 + np.exp(-logits)), task.scores([*logits[:, np.newaxis]])
            expected = (
                ({}, sigmoid),
                ({"raw_scores": False}, sigmoid),
                ({"raw_scores": True}, logits),
                ({"use_activation": False}, logits),
                ({"use_activation": True}, own),
            )
            (both,) = answers_of(app, ("/rerank", texts | others))
            assert (both.status_code, "texts and documents are both there" in both.text) == (400, True)
            answers = answers_of(app, *((path, body | more) for more, _ in expected for path, body in asked))
            for number, answer in enumerate(answers):
                _, scores = expected[number // len(asked)]
                said = answer.json()
                ranked = said if isinstance(said, list) else said["results"]
                by_index = {each["index"]: each.get("score", each.get("relevance_score")) for each in ranked}
                np.testing.assert_allclose([by_index[index] for index in range(3)], scores, rtol=1e-5)
                assert list(by_index.values()) == sorted(by_index.values(), reverse=True)
            plain, raw, info = answers_of(
                application(bundle, session, ServeOptions()),
                ("/predict", pairs),
                ("/predict", pairs | {"raw_scores": True}),
                ("/info", None),
            )
            np.testing.assert_allclose([each["score"] for (each,) in plain.json()], sigmoid, rtol=1e-5)
            np.testing.assert_allclose([each["score"] for (each,) in raw.json()], logits, rtol=1e-5)
            assert info.json()["model_type"] == {"reranker": {"id2label": {"0": "score"}, "label2id": {"score": 0}}}
