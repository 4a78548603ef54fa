"""A task from a folder of its own runs in sessions, jobs and servers; no file of the product knows it.

The folder `toy_task` is what somebody else's package would be: code, and an entry point of the group hdexport.tasks. It
is CONTRIBUTING's recipe for a task.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

import hdruntime
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BundleCorruptError, InputError
from hdruntime.optional import registered_tasks
from hdruntime.serve import ServeOptions, application
from hdruntime.serve.triton_model import tensors_of
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.tasks.of_bundle import task_of_bundle
from hdruntime.tasks.task import Text
from hdruntime.tasks.text_inference import answers_of
from hdruntime.text.tokenization import Overflow
from support.commands import run_here, run_installed
from support.every_key import write_manifest_values
from support.installed import package_installed
from support.tiny_bundle import TABLE, WORDS, make_bundle
from support.tiny_models import save_tiny_model

FOLDER = Path(__file__).with_name("toy_task")
TEXTS = ["long documents are read", "whole", "read long documents " * 9]


@pytest.fixture
def toy_installed() -> Iterator[None]:
    with package_installed(FOLDER, registered_tasks):
        yield


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The tiny bundle, whose manifest names the toy."""
    path = make_bundle(tmp_path / "bundle")
    changed(path, task="loudest-token")
    return path


def changed(bundle: Path, **values: object) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    write_manifest_values(bundle, manifest | values)


def expected(text: str) -> tuple[int, int, float]:
    """By the tiny model: each token's vector plus the mean of the row's, special tokens among them."""
    words = text.split()
    vectors = TABLE[[WORDS.index(word) for word in ("[CLS]", *words, "[SEP]")]].astype(np.float64)
    loudness = (vectors + vectors.mean(0))[1:-1].max(1)
    best = int(np.argmax(loudness))
    start = len(" ".join([*words[:best], ""]))
    return start, start + len(words[best]), float(loudness[best])


@pytest.mark.usefixtures("toy_installed")
def test_a_session_answers_texts_of_any_length(bundle: Path) -> None:
    with hdruntime.load(bundle, "onnxruntime", threads=1) as session:
        task = task_of_bundle(open_bundle(bundle))
        found = answers_of(
            session, task, [Text(text=text) for text in TEXTS], EncodeOptions.of(overflow=Overflow.SPLIT)
        )
        for each, wanted in zip(found[:2], map(expected, TEXTS), strict=False):
            assert (each.start, each.end, pytest.approx(each.loudness, rel=1e-5)) == wanted
        assert TEXTS[2][found[2].start : found[2].end] in WORDS, "of the chunks of a long text"
        with pytest.raises(InputError, match="entities is for token-classification, and the bundle's task is"):
            session.entities(TEXTS)


@pytest.mark.usefixtures("toy_installed")
def test_a_job_writes_its_columns(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS[:2]) + "\n")
    done = run_here("run", bundle, tmp_path / "texts.txt", "-o", tmp_path / "out.jsonl", "--threads", 1)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [list(row) for row in rows] == [["id", "start", "end", "loudness", "tokens", "error"]] * 2
    for row, text in zip(rows, TEXTS, strict=False):
        assert (row["start"], row["end"], pytest.approx(row["loudness"], rel=1e-5)) == expected(text)
    refused = run_here("run", bundle, tmp_path / "texts.txt", "-o", tmp_path / "other.jsonl", "--aggregation", "simple")
    assert "--aggregation is for token-classification, and the bundle's task is loudest-token." in refused.stderr


@pytest.mark.usefixtures("toy_installed")
def test_a_server_has_its_route_and_triton_its_tensor(bundle: Path) -> None:
    assert tensors_of(open_bundle(bundle))[:2] == ("loudest", 3)
    with hdruntime.load(bundle, "onnxruntime", threads=1) as session:
        app = application(open_bundle(bundle), session, ServeOptions())

        async def asked(path: str, body: object) -> Any:
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://server") as client:
                found = await client.post(path, json=body)
                return found.json()

        async def all_asked() -> list[Any]:
            return [
                await asked("/loudest", {"inputs": TEXTS[:2]}),
                await asked("/loudest", {"inputs": "a", "dimensions": 1}),
                await asked("/embed", {"inputs": "a"}),
            ]

        answers, unknown_key, unknown_route = asyncio.run(all_asked())
    for each, text in zip(answers, TEXTS, strict=False):
        assert (each["start"], each["end"], pytest.approx(each["loudness"], rel=1e-5)) == expected(text)
    assert "unknown field `dimensions`" in unknown_key["error"]["message"]
    assert "POST /loudest" in unknown_route["error"]["message"]


@pytest.mark.usefixtures("toy_installed")
def test_inspect_shows_it_and_what_a_bundle_lacks(bundle: Path) -> None:
    """And so does the installed command, which finds the package by itself."""
    lines = run_installed("inspect", bundle).stdout.splitlines()
    assert "task           loudest-token" in lines
    assert "loudest        of 4 numbers for each token" in lines
    manifest = json.loads((bundle / "manifest.json").read_text())
    changed(bundle, outputs=[manifest["outputs"][0] | {"name": "states"}])
    with pytest.raises(BundleCorruptError, match="outputs has no last_hidden_state, which loudest-token needs"):
        open_bundle(bundle)
    changed(bundle, hidden_size=1, outputs=[manifest["outputs"][0] | {"shape": ["batch", "tokens", 1]}])
    with pytest.raises(BundleCorruptError, match="hidden_size is 1, among which none is the largest"):
        open_bundle(bundle)


@pytest.mark.usefixtures("toy_installed")
def test_what_pytorch_computes_for_it_is_not_known_here(bundle: Path, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "bert", Task.FEATURE_EXTRACTION)
    refused = run_here("verify", bundle, "--model", tmp_path / "model")
    assert refused.returncode == 1
    assert "The task loudest-token is another package's" in refused.stderr


def test_without_its_package_the_task_is_unknown(bundle: Path) -> None:
    done = run_here("inspect", bundle)
    assert done.returncode == 1
    assert "manifest.task should be one of 'feature-extraction', 'sentence-similarity'" in done.stderr
    assert 'not "loudest-token"' in done.stderr
    assert "If its task is of another package: install that." in done.stderr
    assert "loudest-token" not in list(Task)
