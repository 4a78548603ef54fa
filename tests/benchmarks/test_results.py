"""The results that are kept name no machine: no absolute path, no serial number, no UUID, no address."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.job import Job
from benchmarks.gpu.machine import describe
from benchmarks.record import append
from hdexport.support.redaction import redact

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").iterdir())


def documents(file: Path) -> list[Any]:
    text = file.read_text(encoding="utf-8")
    return [json.loads(text)] if file.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def naming_lines(files: list[Path]) -> list[str]:
    """File and number of each document that names a machine."""
    return [
        f"{file.name}:{number}"
        for file in files
        for number, document in enumerate(documents(file), 1)
        if redact(document) != document
    ]


def test_no_result_names_a_machine() -> None:
    assert {"gpu_h100.jsonl", "gpu_h200.jsonl", "bench.json", "quality.jsonl"} <= {file.name for file in RESULTS}
    assert naming_lines(RESULTS) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"command": "hdexport bench /home/me/bundle"},
        {"nvidia_smi": ["    Name : /opt/torch/.venv/bin/python3"]},
        {"nvidia_smi": ["    Serial Number                : 1653824161550"]},
        {"serial": 1653824161550},
        {"environment": {"CUDA_VISIBLE_DEVICES": "GPU-53178a4d-4725-4fe0-8f3c-f1f4e91b33d4"}},
        {"gpus": [{"name": "NVIDIA H200", "where": "00000000:00:06.0"}]},
        {"reason": "no route by 00:1a:2b:3c:4d:5e"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_result_that_names_a_machine_is_found_and_none_is_written(tmp_path: Path, wrong: dict[str, Any]) -> None:
    kept = tmp_path / "results.jsonl"
    kept.write_text(json.dumps({"tokens": 512}) + "\n" + json.dumps({"tokens": 4096, **wrong}) + "\n")
    assert naming_lines([kept]) == ["results.jsonl:2"]
    append(written := tmp_path / "written.jsonl", {"tokens": 4096, **wrong})
    assert naming_lines([written]) == []
    assert documents(written)[0]["tokens"] == 4096


def test_a_machine_is_described_by_its_kind_and_versions(tmp_path: Path) -> None:
    """By names of our own: a tool's report says what its next version adds."""
    output = tmp_path / "rows.jsonl"
    describe(Job(step="machine", output=output, rehearsal=True))
    (row,) = documents(output)
    assert set(row) == {
        *("benchmark", "step", "rehearsal", "trial", "date", "case"),
        *("environment", "gpu", "cuda", "libraries"),
    }
    assert {"cpu", "cores", "memory", "python", "torch"} <= set(row["environment"])
    assert all(name.startswith("nvidia-") for name in row["libraries"])
    assert set(row) == set(next(each for each in documents(next(f for f in RESULTS if "h200" in f.name))))
