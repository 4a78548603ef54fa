"""Cohere's embeddings: types of values, input types, truncation, and the exact bodies of both versions."""

from __future__ import annotations

import base64
import dataclasses
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdruntime
from hdexport.support.bundle_writer import seal
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.sentence_settings import SentenceSettings
from hdruntime.serve import ServeOptions, application
from hdruntime.session import Session
from support.serving import answers_of
from support.tiny_bundle import make_bundle

PROMPTS = {"search_query": "read ", "document": "whole ", "own": "are "}
TEXTS = ["long documents", "read"]
LONG = "long documents are read whole " * 5
RANGES = np.array([[-3, -2, -1, 0], [1, 2, 3, 4]], np.float32)


class Served:
    """A bundle of 16 tokens with prompts, its session, and a server of it with ranges."""

    def __init__(self, folder: Path, session: Session) -> None:
        self.session, self._folder = session, folder

    def responses(self, *requests: tuple[str, Any], ranges: bool = True) -> list[Any]:
        """The responses of a new server to paths and bodies."""
        path = str(self._folder / "ranges.npy") if ranges else None
        bundle = open_bundle(self._folder / "bundle")
        return answers_of(application(bundle, self.session, ServeOptions(), ranges=path), *requests)

    def ask(self, path: str, body: Any) -> Any:
        """The response of a new server."""
        return self.responses((path, body))[0]

    def floats(self, body: Any) -> np.ndarray:
        """The float embeddings of a request."""
        found = self.ask("/v2/embed", body)
        assert found.status_code == 200, found.text
        return np.array(found.json()["embeddings"]["float"], np.float32)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("cohere")
    bundle = make_bundle(folder / "bundle", task="sentence-similarity")
    settings = SentenceSettings(kind="encoder", max_seq_length=16, pooling=("mean",), prompts=PROMPTS)
    seal(bundle, dataclasses.replace(open_bundle(bundle).manifest, sentence=settings))
    np.save(folder / "ranges.npy", RANGES)
    with hdruntime.load(bundle, "onnxruntime", threads=1) as session:
        yield Served(folder, session)


def test_every_type_is_bit_equal_to_that_of_sentence_transformers(served: Served) -> None:
    quantize = pytest.importorskip("sentence_transformers.util.quantization").quantize_embeddings
    expected = served.session.embed(TEXTS)
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    said = served.ask("/v2/embed", {"model": "m", "texts": TEXTS, "embedding_types": types}).json()
    assert list(said["embeddings"]) == types
    np.testing.assert_array_equal(np.array(said["embeddings"]["float"], np.float32), expected)
    assert [base64.b64decode(each) for each in said["embeddings"]["base64"]] == [each.tobytes() for each in expected]
    for name in types[1:5]:
        theirs = quantize(expected, precision=name, ranges=RANGES if name.endswith("int8") else None)
        assert said["embeddings"][name] == theirs.tolist(), name
    own = quantize(expected, precision="int8")
    assert said["embeddings"]["int8"] != own.tolist(), "the ranges are the server's, not those of the request"


def test_the_bodies_of_both_versions(served: Served) -> None:
    vectors = served.session.embed(TEXTS)
    tokens = 4 + 3

    def said(path: str, **more: Any) -> Any:
        body = served.ask(path, {"texts": TEXTS, "input_type": "own"} | more).json()
        assert str(uuid.UUID(body.pop("id")))
        return body

    with_prompt = served.session.embed([PROMPTS["own"] + text for text in TEXTS])
    meta = {"billed_units": {"input_tokens": tokens + 2}}
    rest = {"texts": TEXTS, "meta": {"api_version": {"version": "2"}} | meta}
    by_type = {"response_type": "embeddings_by_type", "embeddings": {"float": with_prompt.tolist()}}
    assert said("/v2/embed") == by_type | rest
    of_first = {"texts": TEXTS, "meta": {"api_version": {"version": "1"}} | meta}
    assert said("/v1/embed", embedding_types=["float"]) == by_type | of_first
    floats = {"response_type": "embeddings_floats", "embeddings": with_prompt.tolist()}
    assert said("/v1/embed") == floats | of_first
    assert not np.allclose(vectors, with_prompt)


def test_inputs_are_texts_of_their_parts(served: Served) -> None:
    inputs = [
        {"content": [{"type": "text", "text": "long"}, {"type": "text", "text": "documents"}]},
        {"content": [{"type": "text", "text": "read"}]},
    ]
    np.testing.assert_array_equal(served.floats({"inputs": inputs}), served.session.embed(["long\ndocuments", "read"]))
    found = served.ask("/v2/embed", {"inputs": inputs}).json()
    assert found["texts"] == ["long\ndocuments", "read"]


@pytest.mark.parametrize(
    ("input_type", "prompt"),
    [("search_query", "read "), ("search_document", "whole "), ("classification", ""), ("own", "are ")],
)
def test_an_input_type_is_the_models_prompt(served: Served, input_type: str, prompt: str) -> None:
    found = served.floats({"texts": TEXTS, "input_type": input_type})
    np.testing.assert_array_equal(found, served.session.embed([prompt + text for text in TEXTS]))


def test_texts_are_truncated_at_the_asked_end_and_the_client_is_warned(served: Served) -> None:
    words = LONG.split()
    ends = {"END": words[:14], "START": words[-14:]}
    for more in ({}, {"truncate": "END"}, {"truncate": "START"}):
        found = served.ask("/v2/embed", {"texts": ["read", LONG]} | more)
        kept = " ".join(ends[more.get("truncate", "END")])
        expected = served.session.embed(["read", kept])
        np.testing.assert_allclose(found.json()["embeddings"]["float"], expected, rtol=1e-6)
        assert found.headers["x-truncated-inputs"] == "1"
        assert found.json()["meta"]["warnings"] == ["Text 1 was truncated: 16 of 27 tokens were used."]
    short = served.ask("/v2/embed", {"texts": ["read whole long", "read"], "max_tokens": 4})
    np.testing.assert_allclose(
        short.json()["embeddings"]["float"], served.session.embed(["read whole", "read"]), rtol=1e-6
    )
    assert short.json()["meta"]["warnings"] == ["Text 0 was truncated: 4 of 5 tokens were used."]


REFUSED: list[tuple[Any, str]] = [
    ({"texts": [LONG], "truncate": "NONE"}, "input[0]: "),
    ({"texts": ["read whole long"], "truncate": "NONE", "max_tokens": 4}, "input[0]: "),
    ({"texts": ["read"], "max_tokens": 2}, "max_tokens is 2, and the special tokens alone are 2.\nGive 3 or more."),
    ({}, "either texts or inputs"),
    ({"texts": ["read"], "inputs": [{"content": [{"text": "read"}]}]}, "either texts or inputs"),
    ({"texts": []}, "1 to 2048 fit"),
    ({"texts": ["read"], "embedding_types": []}, "embedding_types is empty"),
    ({"texts": ["read"], "embedding_types": ["int4"]}, "Invalid enum value 'int4'"),
    ({"texts": ["read"], "input_type": "image"}, "\"input_type\" is 'image'; it must be one of"),
    ({"texts": ["read"], "images": ["data:image/png;base64,"]}, "unknown field `images`"),
    ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": ""}}]}]}, "image_url"),
    ({"texts": ["read"], "output_dimension": 5}, "5 dimensions; these have 4"),
    ({"texts": ["read"], "output_dimension": 2, "embedding_types": ["uint8"]}, "of 4 dimensions"),
]


def test_what_cannot_be_embedded_is_refused_in_coheres_form(served: Served) -> None:
    for (_, message), found in zip(
        REFUSED, served.responses(*(("/v2/embed", body) for body, _ in REFUSED)), strict=True
    ):
        assert (found.status_code, sorted(found.json())) == (400, ["id", "message"])
        assert message in found.json()["message"]


def test_int8_without_the_servers_ranges_is_refused(served: Served) -> None:
    (found,) = served.responses(("/v1/embed", {"texts": TEXTS, "embedding_types": ["int8"]}), ranges=False)
    assert found.status_code == 400
    assert "--ranges FILE" in found.json()["message"]
