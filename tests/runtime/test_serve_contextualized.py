"""``POST /v1/contextualizedembeddings``: a session's late chunking, in the shapes of Voyage and Perplexity."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdruntime
from hdruntime.bundle.reader import open_bundle
from hdruntime.serve import ServeOptions, application
from hdruntime.session import Session
from hdruntime.text.embeddings import EmbeddingPrecision, normalized, quantized
from support.serving import answers_of

PATH = "/v1/contextualizedembeddings"
DOCUMENTS = [["Berlin is a city.", "It has 3.8 million people."], ["A single chunk."], ["One,\n", "two,", " three."]]
JOINED = ["Berlin is a city. It has 3.8 million people.", "A single chunk.", "One,\ntwo, three."]
SPANS = [[(0, 17), (18, 44)], [(0, 15)], [(0, 5), (5, 9), (9, 16)]]
ATOL = 1e-6

Ask = Callable[..., tuple[int, Any]]


@pytest.fixture(scope="module")
def session(sample_bundle: Path) -> Iterator[Session]:
    with hdruntime.load(sample_bundle, "onnxruntime", threads=1) as session:
        yield session


@pytest.fixture(scope="module")
def ranges(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the ranges of the chunks' own vectors."""
    path = tmp_path_factory.mktemp("ranges") / "ranges.npy"
    vectors = session.embed([chunk for chunks in DOCUMENTS for chunk in chunks])
    np.save(path, np.stack([vectors.min(axis=0), vectors.max(axis=0)]))
    return path


@pytest.fixture(scope="module")
def ask(sample_bundle: Path, session: Session, ranges: Path) -> Ask:
    """Asks a server for 16 texts a request, which has ranges."""
    bundle, options = open_bundle(sample_bundle), ServeOptions(max_texts=16)

    def ask(**body: Any) -> tuple[int, Any]:
        # An application for each request: its queue belongs to the event loop.
        (found,) = answers_of(application(bundle, session, options, ranges=str(ranges)), (PATH, body))
        return found.status_code, found.json()

    return ask


def embeddings(answer: tuple[int, Any]) -> list[list[Any]]:
    """The embeddings of the chunks of each document."""
    status, said = answer
    assert status == 200, said
    assert [document["index"] for document in said["data"]] == [*range(len(said["data"]))]
    for document in said["data"]:
        assert [chunk["index"] for chunk in document["data"]] == [*range(len(document["data"]))]
    return [[chunk["embedding"] for chunk in document["data"]] for document in said["data"]]


def late_chunks(session: Session, **options: Any) -> list[np.ndarray]:
    return [each.vectors for each in session.embed_chunks(JOINED, chunks=SPANS, **options)]


def refusal(answer: tuple[int, Any]) -> str:
    status, said = answer
    assert status == 400, said
    message: str = said["error"]["message"]
    return message


def assert_documents(found: list[list[Any]], expected: list[np.ndarray]) -> None:
    assert list(map(len, found)) == list(map(len, expected))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=ATOL)


def test_the_chunks_of_each_document_are_a_sessions_late_chunks(ask: Ask, session: Session) -> None:
    expected = late_chunks(session)
    answer = ask(inputs=DOCUMENTS, model="any", input_type="document", output_dtype="float", truncation=True)
    assert_documents(embeddings(answer), expected)
    assert answer[1]["usage"]["total_tokens"] == sum(len(each) for each in session.tokenize(JOINED))
    alone = session.embed([chunk for chunks in DOCUMENTS for chunk in chunks])
    assert np.abs(alone - np.concatenate(expected)).max() > 0.01, "a chunk sees its document"
    np.testing.assert_allclose(expected[1][0], alone[2], rtol=0, atol=ATOL)
    # What voyageai sends of a list of queries, and a plain list.
    for inputs in (["A single chunk."], [["A single chunk."]]):
        assert_documents(embeddings(ask(inputs=inputs, input_type="query")), [expected[1]])


def test_a_document_of_several_windows_is_read_in_full_or_refused(ask: Ask, session: Session) -> None:
    chunks = ["What is read, and by whom? " * 60, "The end."]
    text = "".join(chunks)
    expected = session.embed_chunks(text, chunks=[(0, len(chunks[0])), (len(chunks[0]), len(text))]).vectors
    assert_documents(embeddings(ask(inputs=[chunks])), [expected])
    for key, value in {"truncation": False, "truncate": "error"}.items():
        message = refusal(ask(inputs=[["short"], chunks], **{key: value}))
        assert "input[1]: The text has" in message
        assert f"max_seq_length is {session.max_seq_length}" in message


def test_types_and_dimensions_are_those_of_the_route_of_texts(ask: Ask, session: Session) -> None:
    vectors = late_chunks(session)
    shorter = [normalized(each[:, :64]) for each in vectors]
    assert_documents(embeddings(ask(inputs=DOCUMENTS, output_dimension=64)), shorter)
    bits = [quantized(each, EmbeddingPrecision.UBINARY) for each in vectors]
    assert_documents(embeddings(ask(inputs=DOCUMENTS, output_dtype="ubinary")), bits)
    encoded = embeddings(ask(inputs=DOCUMENTS, output_dtype="ubinary", encoding_format="base64"))
    assert_documents([[np.frombuffer(base64.b64decode(each), np.uint8) for each in one] for one in encoded], bits)


def test_perplexitys_key_has_its_format_by_default(ask: Ask, session: Session) -> None:
    found = embeddings(ask(input=DOCUMENTS, model="any"))
    assert found == embeddings(ask(inputs=DOCUMENTS, output_dtype="int8", encoding_format="base64"))
    bits = embeddings(ask(input=DOCUMENTS, encoding_format="base64_binary", dimensions=64))
    decoded = [[np.frombuffer(base64.b64decode(each), np.uint8) for each in one] for one in bits]
    assert_documents(decoded, [quantized(each[:, :64], EmbeddingPrecision.UBINARY) for each in late_chunks(session)])


def test_documents_are_divided_by_the_server(ask: Ask, session: Session) -> None:
    inputs = [[text] for text in JOINED]
    answer = ask(inputs=inputs, input_type="document", enable_auto_chunking=True, chunk_size=5)
    expected = session.embed_chunks(JOINED, chunks="tokens:5")
    assert_documents(embeddings(answer), [each.vectors for each in expected])
    texts = [[chunk["text"] for chunk in document["data"]] for document in answer[1]["data"]]
    for text, chunks, parts in zip(JOINED, expected, texts, strict=True):
        assert parts == [text[start:end] for start, end in zip(chunks.starts, chunks.ends, strict=True)]
    assert len(texts[0]) > 1
    assert list(map(len, embeddings(ask(inputs=JOINED, enable_auto_chunking=True)))) == [1, 1, 1], "of 512 tokens"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no documents": ({}, "needs the required field `inputs`, or `input`"),
    "both keys": ({"inputs": DOCUMENTS, "input": DOCUMENTS}, "and not both"),
    "no document": ({"inputs": []}, "There are 0 texts"),
    "a text": ({"inputs": ["a", "b"]}, "inputs[0] is a text, and no list of chunks"),
    "an empty document": ({"inputs": [["a"], []]}, "inputs[1] has no chunk"),
    "an empty chunk": ({"input": [["a", ""]]}, "input[0][1] is empty"),
    "a chunk without a token": ({"inputs": [["a"], ["b", " \n "]]}, "input[1]: The chunk [1, 4] has no token"),
    "a document without a token": ({"inputs": ["\n"], "enable_auto_chunking": True}, "The text has no chunk"),
    "numbers": ({"inputs": [[5]]}, "The body is not valid"),
    "many chunks": ({"inputs": [["a"] * 9, ["b"] * 8]}, "17 texts in the request; 1 to 16 fit"),
    "truncation by tokens": ({"inputs": DOCUMENTS, "truncate_prompt_tokens": 5}, "Documents are read in full"),
    "chunks to divide": ({"inputs": DOCUMENTS, "enable_auto_chunking": True}, "inputs[0] has 2 chunks"),
    "a size alone": ({"inputs": DOCUMENTS, "chunk_size": 5}, 'add "enable_auto_chunking": true'),
    "no size": ({"inputs": ["a"], "enable_auto_chunking": True, "chunk_size": 0}, '"chunk_size" is 0'),
    "an overlap": (
        {"inputs": ["a"], "enable_auto_chunking": True, "chunk_size": 5, "chunk_overlap": 1},
        '"chunk_overlap" is 1',
    ),
    "an unknown type": ({"inputs": DOCUMENTS, "output_dtype": "int4"}, "output_dtype"),
    "another dimension of int8": (
        {"inputs": DOCUMENTS, "output_dtype": "int8", "output_dimension": 8},
        "ranges of int8 are of the bundle's own embeddings of 384 dimensions",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_request_is_refused(case: str, ask: Ask) -> None:
    body, said = REFUSED[case]
    assert said in refusal(ask(**body))
