"""A task and its interface are a file each: a task that only this test has runs in sessions, jobs and servers.

The toy stands in for text-scoring, since the names of tasks are a closed enumeration. It is CONTRIBUTING's recipe for a
task: `LoudestToken` is its file in `hdruntime.tasks`, and `toy_interface.py` its file in `hdruntime.serve.interfaces`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest

import hdruntime
from hdruntime.bundle import task_formats
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.task_formats import TaskFormat
from hdruntime.errors import BundleCorruptError, InputError
from hdruntime.serve import ServeOptions, application, interfaces
from hdruntime.tasks import text_scoring
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.tasks.of_bundle import task_of_bundle
from hdruntime.tasks.task import Outputs, Text, TextTask, Values
from hdruntime.tasks.text_inference import answers_of
from hdruntime.text.encoding import Encoding, Overflow
from support.commands import run_here
from support.every_key import write_manifest_values
from support.serving import answers_of as responses
from support.tiny_bundle import TABLE, WORDS, make_bundle

INTERFACES = Path(__file__).with_name("toy_interfaces")
TEXTS = ["long documents are read", "whole", "read long documents " * 9]


class Loudest(NamedTuple):
    """Characters ``start`` to ``end`` of the text, end exclusive, and the largest number of that token."""

    start: int
    end: int
    loudness: float


class LoudestToken(TextTask):
    """The token of a text whose states have the largest number."""

    name = Task.TEXT_SCORING
    needs_text = True

    def fields(self) -> tuple[pa.Field, ...]:
        return tuple(pa.schema({"start": pa.int32(), "end": pa.int32(), "loudness": pa.float32()}))

    def values(self, answer: Loudest) -> Values:
        return answer._asdict()

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> Loudest:
        """The token is a token of the text, and no special token."""
        of_text = [index for index, sequence in enumerate(encoding.sequence_ids) if sequence == 0]
        loudness = outputs["last_hidden_state"][of_text].max(axis=1)
        best = int(np.argmax(loudness))
        return Loudest(*encoding.offsets[of_text[best]], float(loudness[best]))


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny bundle with the toy as its task."""
    form = TaskFormat(output_axes={"last_hidden_state": ("batch", "tokens", "hidden_size")})
    monkeypatch.setitem(task_formats._FORMATS, Task.TEXT_SCORING, form)  # type: ignore[arg-type]
    monkeypatch.setattr(text_scoring, "TASK", LoudestToken)
    monkeypatch.setattr(interfaces, "__path__", [*interfaces.__path__, str(INTERFACES)])
    path = make_bundle(tmp_path / "bundle")
    change(path, task="text-scoring")
    return path


def change(bundle: Path, **values: object) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    write_manifest_values(bundle, manifest | values)


def expected(text: str) -> tuple[int, int, float]:
    """By the tiny model: each token's vector plus the mean of the row's vectors, special tokens included."""
    words = text.split()
    vectors = TABLE[[WORDS.index(word) for word in ("[CLS]", *words, "[SEP]")]].astype(np.float64)
    loudness = (vectors + vectors.mean(0))[1:-1].max(1)
    best = int(np.argmax(loudness))
    start = len(" ".join([*words[:best], ""]))
    return start, start + len(words[best]), float(loudness[best])


def test_a_session_answers_texts_of_any_length(bundle: Path) -> None:
    with hdruntime.load(bundle, "onnxruntime", threads=1) as session:
        task = task_of_bundle(open_bundle(bundle))
        texts, options = [Text(text=text) for text in TEXTS], EncodeOptions.of(overflow=Overflow.SPLIT)
        answers = answers_of(session, task, texts, options)
        for answer, wanted in zip(answers[:2], map(expected, TEXTS), strict=False):
            assert (answer.start, answer.end, pytest.approx(answer.loudness, rel=1e-5)) == wanted
        assert TEXTS[2][answers[2].start : answers[2].end] in WORDS, "of the chunks of a long text"
        with pytest.raises(InputError, match="entities is for token-classification, and the bundle's task is"):
            session.entities(TEXTS)


def test_a_job_writes_its_columns(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS[:2]) + "\n")
    done = run_here("run", bundle, tmp_path / "texts.txt", "-o", tmp_path / "out.jsonl", "--threads", 1)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [list(row) for row in rows] == [["id", "start", "end", "loudness", "tokens", "error"]] * 2
    for row, text in zip(rows, TEXTS, strict=False):
        assert (row["start"], row["end"], pytest.approx(row["loudness"], rel=1e-5)) == expected(text)


def test_a_server_has_the_route_of_its_interface(bundle: Path) -> None:
    with hdruntime.load(bundle, "onnxruntime", threads=1) as session:
        app = application(open_bundle(bundle), session, ServeOptions())
        answers, unknown_key, unknown_route = responses(
            app,
            ("/loudest", {"inputs": TEXTS[:2]}),
            ("/loudest", {"inputs": "a", "dimensions": 1}),
            ("/embed", {"inputs": "a"}),
        )
    for answer, text in zip(answers.json(), TEXTS, strict=False):
        assert (answer["start"], answer["end"], pytest.approx(answer["loudness"], rel=1e-5)) == expected(text)
    assert "unknown field `dimensions`" in unknown_key.json()["error"]["message"]
    assert "POST /loudest" in unknown_route.json()["error"]["message"]


def test_a_bundle_without_its_outputs_is_refused(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(bundle, outputs=[manifest["outputs"][0] | {"name": "states"}])
    with pytest.raises(BundleCorruptError, match="outputs has no last_hidden_state, which text-scoring needs"):
        open_bundle(bundle)


def test_another_tasks_name_is_unknown(bundle: Path) -> None:
    change(bundle, task="loudest-token")
    with pytest.raises(BundleCorruptError, match=r"manifest.task should be one of 'feature-extraction'.*loudest-token"):
        open_bundle(bundle)
