"""The steps of corpora where there is no GPU: what they keep when they are ended, and what the table makes of rows."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.corpus.bench import CorpusSeries
from benchmarks.gpu import corpus
from benchmarks.gpu.job import Job, SkippedError, StepFailedError
from benchmarks.gpu.steps import STEPS
from benchmarks.gpu.table import findings_of, verdicts_of
from fakes.simulated_nvml import IDLE_BYTES, SimulatedNvml
from hdexport.bench.measure.processes import ProcessOutcome
from hdexport.bench.results.result import RunStatus
from hdruntime.errors import InputError
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
OURS = CorpusSeries(
    name="corpus-bert-base (onnxruntime_cuda)", is_baseline=False, seconds=(1.0, 1.0), tokens=900_000,
    computed_tokens=910_000, peak_bytes=3 * 10**9, gpu_busy_share=(0.9, 0.8), gpu_peak_bytes=5 * 10**9,
)  # fmt: skip
DEFAULT = dataclasses.replace(OURS, name="sentence-transformers", is_baseline=True, batch_size=32, seconds=(2.5, 2.5))
BEST = dataclasses.replace(DEFAULT, batch_size=256, is_default=False, seconds=(1.25, 1.25))
ABSENT = CorpusSeries(name="compiled", is_baseline=True, unavailable="torch.compile took more than 60 s")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(step="corpus-mixed", output=tmp_path / "rows.jsonl", rehearsal=False)


def rows_of(job: Job) -> list[dict[str, Any]]:
    assert job.output is not None
    return [json.loads(line) for line in job.output.read_text().splitlines()]


class EndedBench:
    """A benchmark that is ended after two runs."""

    texts = 2000

    def __init__(self, options: Any, source: str, *, on_run: Any, **choices: Any) -> None:
        assert (options.device, source) == ("cuda", "mixed")
        assert choices == {"batch_sizes": None, "compiles": False, "has_baselines": True}
        self._on_run = on_run

    def result(self) -> Any:
        for series in (OURS, DEFAULT):
            self._on_run(series)
        raise KeyboardInterrupt


def test_the_runs_of_a_step_that_is_ended_are_kept(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_bundle", lambda job, model: Path("bundle"))
    monkeypatch.setattr(corpus, "CorpusBench", EndedBench)
    with pytest.raises(KeyboardInterrupt):
        corpus.embed_corpus(job, "mixed", rounds=2)
    ours, default = rows_of(job)
    assert (ours["texts"], ours["tokens"], ours["gpu_busy_share"]) == (2000, 900_000, [0.9, 0.8])
    assert (default["title"], default["seconds"]) == ("sentence-transformers, batch 32", [2.5, 2.5])


def test_a_corpus_that_no_bundle_runs_on_a_gpu_is_skipped(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise InputError("none of these runs on a GPU here:\nno CUDA")

    monkeypatch.setattr(corpus, "_bundle", lambda job, model: Path("bundle"))
    monkeypatch.setattr(corpus, "CorpusBench", refuse)
    with pytest.raises(SkippedError, match="on a GPU here: no CUDA"):
        corpus.embed_corpus(job, "mixed", rounds=2)


def test_the_table_has_the_last_row_of_a_series_and_holds_bundles_to_their_targets() -> None:
    about = {"case": "corpus", "corpus": "mixed", "texts": 2000, "rehearsal": False}
    first = dataclasses.replace(OURS, seconds=(4.0,))
    rows = [
        {**about, "title": series.title, **dataclasses.asdict(series)}
        for series in (first, DEFAULT, BEST, ABSENT, OURS)
    ]
    lines = list(findings_of(rows))
    assert lines[0] == (
        "mixed corpus, corpus-bert-base (onnxruntime_cuda): 2,000 texts/s, 900,000 tokens/s, GPU busy 85%, "
        "5.00 GB of the GPU, 3.00 GB of the process"
    )
    assert "mixed corpus, compiled: not run: torch.compile took more than 60 s" in lines
    assert list(verdicts_of(rows)) == [
        "mixed corpus: 2.50x sentence-transformers at its default batch size, target 2.0: met",
        "mixed corpus: 1.25x sentence-transformers at its best batch size, target 1.3: MISSED",
        "mixed corpus: the GPU computes 85% of the time, target 75%: met",
    ]
    unknown = [row | {"gpu_busy_share": [], "gpu_peak_bytes": None} for row in rows]
    text = "\n".join([*findings_of(unknown), *verdicts_of(unknown)])
    assert "not known how busy the GPU is, 3.00 GB of the process" in text
    assert "computes" not in text
    assert "0%" not in text


class SimulatedCommands:
    """Commands that write a table of the given vectors, while the GPU is half busy."""

    def __init__(self, nvml: SimulatedNvml, *vectors: list[list[float]]) -> None:
        self.commands: list[list[str]] = []
        self._nvml, self._vectors = nvml, list(vectors)
        nvml.busy_percent = 50

    def __call__(self, arguments: Sequence[str], *, time_limit_s: float) -> ProcessOutcome:
        assert arguments[0] == "-c"
        command = list(arguments[2:])
        self.commands.append(command)
        if not self._vectors:
            return ProcessOutcome(status=RunStatus.OUT_OF_MEMORY, reason="no memory")
        self._nvml.used_bytes, looks = IDLE_BYTES + 10**9, self._nvml.looks
        wait_until(lambda: self._nvml.looks >= looks + 3)
        ended = time.monotonic()
        self._nvml.used_bytes = IDLE_BYTES
        output = command[command.index("-o") + 1] if "-o" in command else command[-1]
        pq.write_table(pa.table({"id": [0, 1], "embedding": self._vectors.pop(0)}), output)
        return ProcessOutcome(
            status=RunStatus.OK, output={"began": ended - 4, "ended": ended}, peak_rss_bytes=2 * 10**9
        )


@pytest.fixture
def nvml(job: Job, monkeypatch: pytest.MonkeyPatch) -> SimulatedNvml:
    simulated = SimulatedNvml()
    monkeypatch.setitem(sys.modules, "pynvml", simulated)
    source = job.folder / "corpus-texts.parquet"
    pq.write_table(pa.table({"id": [0, 1], "text": ["a", "b"]}), source)
    monkeypatch.setattr(corpus, "_bundle", lambda job, model: job.folder / model)
    return simulated


def test_the_whole_job_is_timed_beside_the_script_and_their_rows_are_compared(
    job: Job, nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = [[1.0, 0.0], [0.0, 1.0]]
    run = SimulatedCommands(nvml, vectors, vectors)
    monkeypatch.setattr(corpus, "run_process", run)
    corpus.run_job(job)
    ours, theirs = run.commands
    assert ours[:3] == ["-m", "hdexport", "run"]
    assert "onnxruntime_cuda" in ours
    assert Path(theirs[0]).name == "ten_lines.py"
    assert theirs[1].endswith("minilm-checkpoint")
    *timed, answers = rows_of(job)
    assert (answers["passed"], answers["min_cosine"]) == (True, 1.0)
    for row in timed:
        assert (row["seconds"], row["texts"], row["gpu_busy_share"]) == (pytest.approx(4), 2, pytest.approx(0.5))
        assert (row["gpu_peak_bytes"], row["peak_bytes"]) == (10**9, 2 * 10**9)
    assert list(findings_of(timed)) == [
        f"2 texts, {what}: 4.0 s, GPU busy 50%, 1.00 GB of the GPU, 2.00 GB of the process"
        for what in ("hdexport run", "ten lines of sentence-transformers")
    ]


def test_other_vectors_and_a_command_that_fails_fail_the_step(
    job: Job, nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = [[1.0, 0.0], [0.0, 1.0]]
    monkeypatch.setattr(corpus, "run_process", SimulatedCommands(nvml, vectors, vectors[::-1]))
    with pytest.raises(StepFailedError, match="are not the script's: cosine 0"):
        corpus.run_job(job)
    monkeypatch.setattr(corpus, "run_process", SimulatedCommands(nvml))
    with pytest.raises(StepFailedError, match="hdexport run: no memory"):
        corpus.run_job(job)
    assert list(findings_of(rows_of(job)[-1:])) == ["2 texts, hdexport run: OOM: no memory"]


def test_a_command_is_timed_from_its_start_to_its_end_and_its_last_words_are_kept() -> None:
    for code, status in (("pass", "ok"), ("raise SystemExit('it is wrong')", "failed")):
        done = subprocess.run([sys.executable, "-c", corpus._TIMED, "-c", code], capture_output=True, text=True)
        said = json.loads(done.stdout)
        assert said["began"] < said["ended"]
        assert said.get("status", "ok") == status
        assert said.get("reason", "it is wrong").strip().endswith("it is wrong")


def test_the_script_has_ten_lines_and_embeds_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = corpus._TEN_LINES.read_text().splitlines()
    assert len([line for line in lines if line.strip()]) == 10
    job = Job(step="corpus-job", output=tmp_path / "rows.jsonl", rehearsal=True)
    checkpoint, source, output = (tmp_path / name for name in ("model", "texts.parquet", "vectors.parquet"))
    corpus._save_checkpoint(checkpoint, corpus._TINY, job)
    pq.write_table(pa.table({"id": ["a", "b"], "text": ["an object", "a class of objects"]}), source)
    monkeypatch.setattr(sys, "argv", ["ten_lines.py", str(checkpoint), str(source), str(output)])
    exec(compile("\n".join(lines), "ten_lines.py", "exec"), {})
    table = pq.read_table(output)
    assert table["id"].to_pylist() == ["a", "b"]
    assert np.stack(table["embedding"].to_numpy()).shape == (2, corpus._TINY[0])


def test_the_mixed_corpus_and_the_job_are_the_first_timings_and_take_less_than_four_minutes() -> None:
    first, *steps = [step for step in STEPS if step.is_timed]
    assert [first.name, *(step.name for step in steps[:2])] == ["ceilings", "corpus-mixed", "corpus-job"]
    assert sum(step.budget_s for step in steps[:2]) <= 4 * 60


@pytest.mark.nightly
def test_a_rehearsal_embeds_a_corpus_and_runs_the_job(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    steps = ["corpus-short", "corpus-job"]
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--output", output, "--steps", *steps]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert {row["step"]: row["status"] for row in rows if row["case"] == "step"} == dict.fromkeys(steps, "ok")
    last = {row["title"]: row for row in rows if row["case"] == "corpus"}
    ours, baseline, *_ = last.values()
    assert "(onnxruntime)" in ours["name"]
    assert baseline["name"] == "sentence-transformers, PyTorch, float32"
    assert all(row["seconds"] and not row["gpu_busy_share"] and not row["gpu_peak_bytes"] for row in (ours, baseline))
    # Weights are of half precision in the bundle, and of float32 in the checkpoint.
    assert ours["max_abs_error"] < 1e-2
    assert [row["status"] for row in rows if row["case"] == "corpus job"] == ["ok", "ok"]
    assert next(row["passed"] for row in rows if row["case"] == "corpus answers")
