"""Clients of other products beside the bundles that they ask: what each received, and its distance from a session's.

The programs of `tests/clients` run in environments of their own, which `make test-all` makes.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import hdruntime
from hdexport.support.bundle_writer import seal
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import open_bundle
from hdruntime.text.chunking import joined_chunks
from hdruntime.text.tokenization import TextTokenizer
from support.serving import command

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv" / "clients"
PROGRAMS = {path.stem.removeprefix("ask_"): path for path in sorted((ROOT / "tests" / "clients").glob("ask_*.py"))}
"""Client -> its program, found by looking."""

PROMPTS = {"query": "question: ", "document": "passage: "}
TEXTS = ["A first text, about rivers.", "Ein zweiter Text: Äpfel, naïve Cafés.", "many words " * 280]
MANY = [f"text {number} of two hundred" for number in range(200)]
QUERY, DOCUMENTS = "w1 w2 w3", ["w7 w8 w9", "w9", "w10 w11 w12 w13 w14"]
LABELLED = ["long documents", "read"]
CHUNKS = [["Berlin is a city.", "It has 3.8 million people."], ["A single chunk."], ["many words\n" * 300, "the end"]]
TOLERANCE = 1e-6
DIMENSIONS, MAX_TOKENS = 64, 16
_EXACT = ("int8", "uint8", "binary", "ubinary", "ids", "decoded")
"""First or last words of the names of what a client must receive exactly."""


class Received(NamedTuple):
    """A call of a client beside the bundle's own numbers.

    Attributes:
        client: the client with its version, and the libraries below it with theirs.
        call: what was called.
        expected: the numbers that it must equal, in words.
        error: largest absolute error; 0 where the numbers must be equal, infinity where they are not.
        first, own: the first value that was received, and that of the bundle.
    """

    client: str
    call: str
    expected: str
    error: float
    first: object
    own: object

    @property
    def is_exact(self) -> bool:
        """Whether the numbers must be equal."""
        return _is_exact(self.expected)


class Served(NamedTuple):
    """Servers of three bundles, and what their sessions give."""

    given: dict[str, Any]
    expected: dict[str, Any]

    def received(self, name: str) -> list[Received]:
        """What the client of a program received; the program's failure is an error."""
        python = CLIENTS / name / "bin" / "python"
        done = subprocess.run(
            [python, PROGRAMS[name]], input=json.dumps(self.given), capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-3000:]
        rows = []
        for row in json.loads(done.stdout.splitlines()[-1]):
            name, value = row["expected"], row["value"]
            first, own = first_value(value), first_value(self.expected[name])
            if name == "base64":
                first = float(np.frombuffer(base64.b64decode(value[0]), "<f4")[0])
            rows.append(Received(row["client"], row["call"], name, error(value, self.expected, name), first, own))
        return rows


def error(value: Any, expected: dict[str, Any], name: str) -> float:
    """The largest absolute difference of a client's numbers from the bundle's own of a name."""
    own = expected[name]
    if _is_exact(name):
        return 0.0 if value == own else np.inf
    if name == "base64":
        value, own = [np.frombuffer(base64.b64decode(row), "<f4") for row in value], expected["embeddings"]
    if name == "classes":
        labels = [sorted(classes) for classes in own]
        if [sorted(classes) for classes in value] != labels:
            return np.inf
        value, own = (
            [[classes[label] for label in row] for classes, row in zip(each, labels, strict=True)]
            for each in (value, own)
        )
    if len(value) != len(own):
        return np.inf
    pairs = [(np.asarray(found, np.float64), np.asarray(wanted)) for found, wanted in zip(value, own, strict=True)]
    if any(found.shape != wanted.shape for found, wanted in pairs):
        return np.inf
    return float(max(np.abs(found - wanted).max() for found, wanted in pairs))


def make_reranker(directory: Path) -> None:
    """Build ``directory / "bundle"``, of 64 tokens, which gives a pair one score."""
    from hdexport.build import BuildOptions, build
    from support.tiny_models import save_tiny_model

    labels: dict[str, Any] = {"id2label": {0: "score"}, "label2id": {"score": 0}}
    save_tiny_model(directory / "checkpoint", "bert", Task.TEXT_CLASSIFICATION, **labels)
    build(BuildOptions(model=directory / "checkpoint", output=directory / "bundle", max_len=64, verify=None))


def first_value(value: Any) -> object:
    """The first number or text in lists of lists, of an object that of the first name."""
    while not isinstance(value, str | int | float | np.number):
        value = value[min(value)] if isinstance(value, dict) else value[0]
    return value.item() if isinstance(value, np.number) else value


def _is_exact(name: str) -> bool:
    words = name.split()
    return words[0] in _EXACT or words[-1] in _EXACT


@contextlib.contextmanager
def served(sample_bundle: Path, reranker_bundle: Path, classifier_bundle: Path, folder: Path) -> Iterator[Served]:
    """Serve a copy of the sample's bundle with prompts and ranges, a reranker and a classifier."""
    bundle = folder / "embedder"
    shutil.copytree(sample_bundle, bundle)
    manifest = open_bundle(bundle).manifest
    assert manifest.sentence is not None, "the sample is a model of sentence-transformers"
    sentence = dataclasses.replace(manifest.sentence, prompts=PROMPTS)
    seal(bundle, dataclasses.replace(manifest, sentence=sentence))
    expected = _of_embedder(bundle, folder / "ranges.npy") | _of_pairs(reranker_bundle) | _of_classes(classifier_bundle)
    options = ("--backend", "onnxruntime", "--threads", "1")
    with (
        command(bundle, *options, "--max-seq-length", "bundle", "--ranges", str(folder / "ranges.npy")) as (
            embedder,
            _,
        ),
        command(reranker_bundle, *options) as (reranker, _),
        command(classifier_bundle, *options) as (classifier, _),
    ):
        addresses = {
            name: str(client.base_url).rstrip("/")
            for name, client in (("embedder", embedder), ("reranker", reranker), ("classifier", classifier))
        }
        texts = {
            "texts": TEXTS,
            "many": MANY,
            "query": QUERY,
            "documents": DOCUMENTS,
            "labelled": LABELLED,
            "chunks": CHUNKS,
        }
        yield Served(addresses | texts, expected)


def _of_embedder(bundle: Path, ranges_file: Path) -> dict[str, Any]:
    from sentence_transformers.util.quantization import quantize_embeddings

    joined = [joined_chunks(chunks) for chunks in CHUNKS]
    with hdruntime.load(bundle, "onnxruntime", threads=1, max_seq_length="bundle") as session:
        chunks = {
            prefix: [
                each.vectors
                for each in session.embed_chunks(
                    [text for text, _ in joined], chunks=[spans for _, spans in joined], prompt_name=prompt_name
                )
            ]
            for prefix, prompt_name in (("chunks", "document"), ("plain chunks", None))
        }
        divided = session.embed_chunks(TEXTS[-1], chunks="tokens:100", prompt_name="document").vectors
        embeddings, many = session.embed(TEXTS), session.embed(MANY)
        queries, documents = (session.embed([PROMPTS[name] + text for text in TEXTS]) for name in PROMPTS)
        states = [each["last_hidden_state"] for each in session.infer(session.tokenize(TEXTS))]
        tokenizer: TextTokenizer = session.tokenizer
        whole = [tokenizer.whole.encode(text) for text in TEXTS]
        ids = [encoding.ids for encoding in whole]
        ends = {
            name: [
                session.embed([_kept(tokenizer, text, encoding, name)])[0]
                for text, encoding in zip(TEXTS, whole, strict=True)
            ]
            for name in ("START", "END")
        }
    ranges = np.stack([many.min(axis=0), many.max(axis=0)])
    np.save(ranges_file, ranges)
    shorter = embeddings[:, :DIMENSIONS]
    found: dict[str, Any] = {
        "embeddings": embeddings,
        "queries": queries,
        "documents": documents,
        "many": many,
        "many int8": quantize_embeddings(many, "int8", ranges=ranges).tolist(),
        "shorter": shorter / np.linalg.norm(shorter, axis=1, keepdims=True),
        "states": states,
        "ids": ids,
        "decoded": [tokenizer.whole.decode(each) for each in ids],
        "decoded with special tokens": [tokenizer.whole.decode(each, skip_special_tokens=False) for each in ids],
        "cosines": embeddings[1:] @ embeddings[0],
        "base64": embeddings,
        "documents ubinary": quantize_embeddings(documents, "ubinary").tolist(),
        "queries ubinary": quantize_embeddings(queries, "ubinary").tolist(),
    }
    found |= chunks | {"divided": divided}
    for name in ("int8", "uint8", "binary", "ubinary"):
        for prefix, documents_of in chunks.items():
            found[f"{prefix} {name}"] = [
                quantize_embeddings(each, name, ranges=ranges if name.endswith("int8") else None).tolist()
                for each in documents_of
            ]
        found[name] = quantize_embeddings(embeddings, name, ranges=ranges if name.endswith("int8") else None).tolist()
    return found | ends


def _kept(tokenizer: TextTokenizer, text: str, encoding: Any, truncate: str) -> str:
    """The part of a text that has the first or last tokens of a truncated text, with two special tokens."""
    room = MAX_TOKENS - 2
    words = [
        place for place, special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True) if not special
    ]
    if len(words) <= room:
        return text
    return text[words[-room][0] :] if truncate == "START" else text[: words[room - 1][1]]


def _of_pairs(bundle: Path) -> dict[str, Any]:
    with hdruntime.load(bundle, "onnxruntime", threads=1) as session:
        pairs = session.tokenize([QUERY] * len(DOCUMENTS), DOCUMENTS)
        logits = np.array([each["logits"][0] for each in session.infer(pairs)], np.float64)
    return {"scores": 1 / (1 + np.exp(-logits))}


def _of_classes(bundle: Path) -> dict[str, Any]:
    with hdruntime.load(bundle, "onnxruntime", threads=1) as session:
        logits = np.array([each["logits"] for each in session.infer(session.tokenize(LABELLED))], np.float64)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = powers / powers.sum(axis=1, keepdims=True)
    classes = [{f"LABEL_{index}": value for index, value in enumerate(row)} for row in probabilities.tolist()]
    return {"probabilities": probabilities, "classes": classes}
