"""The benchmark of all families: every family has a shape, and docs/models.md is what the record says."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.families import cases, recorded_families
from benchmarks.cpu.family_shapes import base_config
from hdexport.families import SUPPORTED_MODEL_TYPES, family_of
from hdexport.model.task import model_from_config
from hdruntime.bundle.manifest import Task
from support.pages import ROOT, page

GENERATOR = runpy.run_path(str(ROOT / "docs" / "generate_models.py"))

DONE: dict[str, Any] = {
    "model_type": "bert",
    "checks": {"verified": "yes", "fp16": "yes", "engine": "no: ExportError: too large"},
    "ratios": [{"case": "bundle 512", "median": 0.456}, {"case": "bundle 4096", "median": 0.321}],
    "cpu": "A CPU",
    "date": "2026-11-23T00:00:00",
    "layers": 2,
}
FAILED: dict[str, Any] = {"model_type": "esm", "checks": {"verified": "no: it differs"}, "failed": "no: out of memory"}


def record(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "families.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_the_page_is_that_of_the_record() -> None:
    assert page("docs/models.md") == GENERATOR["page"](), "run: python docs/generate_models.py"


def test_a_page_says_what_a_record_says(tmp_path: Path) -> None:
    ratios = {name: value for name, value in DONE.items() if name != "checks"}
    checks = {"model_type": "bert", "checked": "2026-11-24T00:00:00", "checks": DONE["checks"]}
    failed = {"model_type": "bert", "failed": "no: out of memory"}
    families = record(tmp_path, DONE | {"ratios": []}, failed, ratios, checks, FAILED)
    written = GENERATOR["page"](families, tmp_path / "none").splitlines()
    assert "| bert | yes | yes | yes | no | 0.46 | 0.32 |" in written
    assert "| esm | no | - | yes | - | - | - |" in written
    assert "| modernbert | - | - | its own | - | - | - |" in written
    assert "* bert, engine: ExportError: too large" in written
    assert "* esm, measured: out of memory" in written
    assert "Measured on: A CPU, 2026-11-23, layers: 2." in written
    assert sum(line.startswith("| ") for line in written) == 1 + len(SUPPORTED_MODEL_TYPES)


def test_what_failed_is_measured_again(tmp_path: Path) -> None:
    written = record(tmp_path, DONE, FAILED)
    assert recorded_families(written, "latency") == {"bert"}
    assert recorded_families(written, "checks") == {"bert", "esm"}
    assert recorded_families(tmp_path / "none", "latency") == recorded_families(None, "checks") == set()
    assert cases([512]) == ["bundle 512", "hugging-face 512"]


def test_every_family_has_a_base_shape() -> None:
    for model_type in SUPPORTED_MODEL_TYPES:
        config = base_config(model_type, layers=2)
        with torch.device("meta"):
            model = model_from_config(config, family=family_of(model_type), task=Task.FEATURE_EXTRACTION)
        found = (model.config.num_hidden_layers, model.config.hidden_size, model.config.vocab_size)
        assert found == (2, 768, 1000), model_type
