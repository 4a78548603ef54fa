"""vLLM's routes: scores of pairs by rerankers and embedders, classes, what a model pools, and tokens."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import hdruntime
from hdruntime.bundle.reader import open_bundle
from hdruntime.serve import ServeOptions, application
from hdruntime.session import Session
from support.serving import answers_of, message_of
from support.tiny_bundle import make_bundle

LONG = "long documents are read whole " * 5
FIRST, SECOND = ["w1 w2", "w3", "w4"], ["w7 w8", "w9", "w10 w11"]


class Served:
    """A bundle, its session, and a server of it."""

    def __init__(self, path: Path, session: Session) -> None:
        self.path, self.session = path, session

    def response(self, path: str, body: Any) -> Any:
        """The response of a new server."""
        return answers_of(application(open_bundle(self.path), self.session, ServeOptions()), (path, body))[0]

    def ask(self, path: str, body: Any, *, kind: str = "") -> Any:
        """The content of a response, without what differs from time to time."""
        found = self.response(path, body)
        assert found.status_code == 200, found.text
        content = found.json()
        if kind:
            assert re.fullmatch(rf"{kind}-[0-9a-f]{{32}}", content.pop("id"))
            assert content.pop("created") > 1_700_000_000
            assert (content.pop("object"), content.pop("model")) == ("list", self.session.manifest.name)
        return content

    def token_vectors(self, texts: list[str]) -> list[np.ndarray]:
        """The vectors of each text's tokens."""
        return [each["last_hidden_state"] for each in self.session.infer(self.session.tokenize(texts))]

    def refusal(self, path: str, body: Any) -> str:
        """The message of a request that is refused."""
        found = self.response(path, body)
        assert found.status_code == 400, found.text
        return message_of(found.json())


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Of four classes, with 16 tokens."""
    path = make_bundle(tmp_path_factory.mktemp("classes") / "bundle", task="text-classification")
    with hdruntime.load(path, "onnxruntime", threads=1) as session:
        yield Served(path, session)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Of 16 tokens."""
    path = make_bundle(tmp_path_factory.mktemp("vectors") / "bundle", task="sentence-similarity")
    with hdruntime.load(path, "onnxruntime", threads=1) as session:
        yield Served(path, session)


@pytest.fixture(scope="module")
def reranker(reranker_bundle: Path) -> Iterator[Served]:
    with hdruntime.load(reranker_bundle, "onnxruntime", threads=1) as session:
        yield Served(reranker_bundle, session)


SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


@pytest.mark.parametrize("names", SIDES)
def test_scores_are_the_rerankers_of_each_pair(reranker: Served, names: tuple[str, str]) -> None:
    for first, second in ((FIRST[0], SECOND[0]), (FIRST[0], SECOND), (FIRST[:1], SECOND), (FIRST, SECOND)):
        seconds = [second] if isinstance(second, str) else second
        firsts = [first] if isinstance(first, str) else first
        pairs = reranker.session.tokenize(firsts * (len(seconds) // len(firsts)), seconds)
        logits = np.array([each["logits"][0] for each in reranker.session.infer(pairs)])
        for more, expected in (({}, 1 / (1 + np.exp(-logits))), ({"use_activation": False}, logits)):
            said = reranker.ask("/score", dict(zip(names, (first, second), strict=True)) | more, kind="score")
            tokens = sum(map(len, pairs))
            assert said["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
            found = [(each.pop("score"), each)[0] for each in said["data"]]
            assert said["data"] == [{"index": index, "object": "score"} for index in range(len(seconds))]
            np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_scores_of_an_embedder_are_cosines(embedder: Served) -> None:
    texts = ["long documents", "read", "whole"]
    vectors = embedder.session.embed(texts).astype(np.float64)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    said = embedder.ask("/v1/score", {"text_1": texts[0], "text_2": texts}, kind="score")
    np.testing.assert_allclose([each["score"] for each in said["data"]], unit @ unit[0], rtol=1e-5)
    assert said["usage"]["prompt_tokens"] == 4 + 3 + 3, "each text runs once"
    both = embedder.ask("/score", {"queries": texts, "items": texts[::-1]}, kind="score")
    np.testing.assert_allclose([each["score"] for each in both["data"]], (unit * unit[::-1]).sum(axis=1), rtol=1e-5)


def test_a_score_of_a_truncated_text_says_so(embedder: Served, reranker: Served) -> None:
    body = {"text_1": "read", "text_2": ["whole", LONG, "read"], "truncate_prompt_tokens": 5}
    found = embedder.response("/score", body)
    assert found.headers["x-truncated-inputs"] == "1"
    assert [each.get("tokens_given") for each in found.json()["data"]] == [None, 27, None]
    found = embedder.response("/score", {"text_1": LONG, "text_2": ["whole", "read"], "truncate_prompt_tokens": 5})
    assert found.headers["x-truncated-inputs"] == "0-1"
    long = reranker.response("/score", {"text_1": "w1", "text_2": ["w7", "w7 " * 100], "truncate_prompt_tokens": -1})
    assert long.headers["x-truncated-inputs"] == "1"
    assert reranker.response("/score", {"text_1": "w1", "text_2": "w7 " * 100}).status_code == 400, "as vLLM does"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text_1": ["w1", "w2"], "text_2": ["w3"]}, "text_1 has 2 texts and text_2 1"),
        ({"text_1": ["w1", "w2"], "text_2": ["w3"] * 4}, "text_1 has 2 texts and text_2 4"),
        ({"text_1": [], "text_2": []}, "text_1 has 0 texts and text_2 0"),
        ({"queries": "w1", "text_2": "w2"}, "queries and documents, queries and items, text_1 and text_2"),
        ({"queries": "w1"}, "does not have the two sides"),
        ({"text_1": "w1", "text_2": "w1", "items": "w1"}, "does not have the two sides"),
        ({"text_1": {"content": []}, "text_2": "w1"}, "text_1"),
    ],
)
def test_sides_that_do_not_fit_are_refused(reranker: Served, body: Any, message: str) -> None:
    assert message in reranker.refusal("/score", body)


def test_classes_have_a_label_and_the_probabilities(classifier: Served) -> None:
    texts = ["long documents", "read"]
    batch = classifier.session.tokenize(texts)
    logits = np.array([each["logits"] for each in classifier.session.infer(batch)])
    softmax = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for given in (texts, [encoding.input_ids for encoding in batch]):
        for more, expected in (({}, softmax), ({"use_activation": True}, softmax), ({"use_activation": False}, logits)):
            said = classifier.ask("/classify", {"input": given} | more, kind="classify")
            found = [each.pop("probs") for each in said["data"]]
            np.testing.assert_allclose(found, expected, rtol=1e-5)
            labels = [f"LABEL_{index}" for index in expected.argmax(axis=1)]
            assert said["data"] == [
                {"index": index, "label": label, "num_classes": 4} for index, label in enumerate(labels)
            ]
            assert said["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    one = classifier.ask("/classify", {"input": texts[0]}, kind="classify")
    assert len(one["data"]) == 1
    pooled = classifier.ask("/pooling", {"input": texts, "task": "classify"}, kind="pool")
    np.testing.assert_allclose([each["data"] for each in pooled["data"]], softmax, rtol=1e-5)
    assert "'embed'; it must be one of 'classify'" in classifier.refusal("/pooling", {"input": "read", "task": "embed"})
    assert (
        "There is no route POST /score for models of text-classification. There are"
        in classifier.response("/score", {}).text
    ), "four classes are no score"


def test_classes_are_infinitys_where_the_request_has_its_key(classifier: Served) -> None:
    texts = ["long documents", "read"]
    logits = np.array([each["logits"] for each in classifier.session.infer(classifier.session.tokenize(texts))])
    softmax = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for raw_scores, expected in ((False, softmax), (True, logits)):
        body = {"input": texts, "model": "default/not-specified", "raw_scores": raw_scores}
        found = classifier.response("/v1/classify", body).json()
        assert (found["object"], found["id"][:9]) == ("classify", "infinity-")
        for classes, scores in zip(found["data"], expected, strict=True):
            order = np.argsort(-scores)
            assert [each["label"] for each in classes] == [f"LABEL_{index}" for index in order]
            np.testing.assert_allclose([each["score"] for each in classes], scores[order], rtol=1e-5)
        assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    long = classifier.response("/classify", {"input": [LONG], "raw_scores": False, "truncate": "end"})
    assert (long.headers["x-truncated-inputs"], long.json()["usage"]["truncated_inputs"]) == ("0", 1)
    both = {"input": texts, "raw_scores": False, "use_activation": True}
    assert "Give raw_scores for infinity's answer" in classifier.refusal("/classify", both)


def test_what_an_embedder_pools_are_embeddings_or_vectors_of_tokens(embedder: Served) -> None:
    texts = ["long documents", "read"]
    vectors, of_tokens = embedder.session.embed(texts), embedder.token_vectors(texts)
    norms = [np.linalg.norm(each, axis=-1, keepdims=True) for each in (*vectors, *of_tokens)]
    for more, expected in (
        ({}, [*vectors]),
        ({"task": "embed", "use_activation": False}, [*vectors]),
        ({"use_activation": True}, [each / norm for each, norm in zip(vectors, norms[:2], strict=True)]),
        ({"task": "token_embed"}, of_tokens),
        (
            {"task": "token_embed", "use_activation": True},
            [each / norm for each, norm in zip(of_tokens, norms[2:], strict=True)],
        ),
    ):
        said = embedder.ask("/pooling", {"input": texts} | more, kind="pool")
        encoded = embedder.ask("/pooling", {"input": texts, "encoding_format": "base64"} | more, kind="pool")
        for index, (each, in_base64) in enumerate(zip(said["data"], encoded["data"], strict=True)):
            assert (each["index"], each["object"]) == (index, "pooling")
            np.testing.assert_allclose(each["data"], expected[index], rtol=1e-6)
            found = np.frombuffer(base64.b64decode(in_base64["data"]), "<f4").reshape(expected[index].shape)
            np.testing.assert_allclose(found, expected[index], rtol=1e-6)


def test_vectors_of_tokens_are_not_given_without_end(embedder: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServeOptions, "max_response_bytes", lambda self: 4 * 16 * 2 * 22)
    body = {"input": [LONG] * 2, "task": "token_embed", "truncate": "end"}
    assert embedder.response("/pooling", body).status_code == 200
    ids = {"input": [[2, *[4] * 14, 3]] * 3}
    for more in ({"input": [LONG] * 2 + ["read"]}, {"truncate": "split"}, ids):
        assert "it may have 0.0 MiB" in embedder.refusal("/pooling", body | more)
    assert embedder.response("/pooling", body | ids | {"encoding_format": "base64"}).status_code == 200


def test_tokens_are_answered_in_the_form_of_the_keys(embedder: Served) -> None:
    tokenizer = Tokenizer.from_file(str(embedder.path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    for special in (True, False):
        expected = tokenizer.encode(LONG, add_special_tokens=special)
        said = embedder.ask("/tokenize", {"model": "m", "prompt": LONG, "add_special_tokens": special})
        assert said == {"count": len(expected), "max_model_len": 16, "tokens": expected.ids, "token_strs": None}
        said = embedder.ask("/tokenize", {"prompt": LONG, "return_token_strs": True, "add_special_tokens": special})
        assert said["token_strs"] == expected.tokens
        assert embedder.ask("/detokenize", {"model": "m", "tokens": expected.ids}) == {
            "prompt": tokenizer.decode(expected.ids, skip_special_tokens=False)
        }
    of_inputs = embedder.ask("/tokenize", {"inputs": "read"})
    assert [[token["id"] for token in each] for each in of_inputs] == [tokenizer.encode("read").ids]
    for body, message in (
        ({}, "either inputs or prompt"),
        ({"inputs": "read", "prompt": "read"}, "either inputs or prompt"),
        ({"prompt": "read", "prompt_name": "query"}, "prompt_name goes with inputs"),
        ({"inputs": "read", "return_token_strs": True}, "return_token_strs goes with prompt"),
        ({"messages": [{"role": "user", "content": "read"}]}, "unknown field `messages`"),
    ):
        assert message in embedder.refusal("/tokenize", body)
    assert "tokens[0]: 11 is no id" in embedder.refusal("/detokenize", {"tokens": [5, 11]})
