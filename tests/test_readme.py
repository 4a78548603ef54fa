"""The README: its table is generated, its commands and its example run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from hdexport.checkpoint import default_model
from hdexport.families import SUPPORTED_MODEL_TYPES
from hdexport.graph.lowering import onnxruntime_cpu, tensorrt
from hdexport.model.precision import Precision
from hdplugins import OPERATORS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.xdist_group("readme")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def support_table() -> str:
    lines = [
        "| operator | ONNX function | ONNX Runtime CPU | TensorRT, TensorRT-RTX |",
        "|---|---|---|---|",
    ]
    for name, operator in OPERATORS.items():
        function = ", ".join(Precision) if operator.has_face("onnx_function") else "-"
        fused = onnxruntime_cpu.FUSED_DTYPES[name]
        cpu = "fused in " + ", ".join(fused) if fused else "linear function, fused for short texts"
        kind = "plugin" if operator.has_face("tensorrt_plugin") else "fused"
        engine = f"{kind} in " + ", ".join(tensorrt.FUSED_DTYPES[name]) + "; function otherwise"
        lines.append(f"| {name} | {function} | {cpu} | {engine} |")
    return "\n".join(lines)


def test_the_support_table_is_that_of_the_operators() -> None:
    found = re.search(r"<!-- support table -->\n(.*?)\n<!-- end of support table -->", README, re.DOTALL)
    assert found is not None
    assert found.group(1) == support_table()


def plain_name(name: str) -> str:
    """BigBird-Pegasus and bigbird_pegasus are one."""
    return name.lower().replace("-", "").replace("_", "")


def test_every_supported_family_is_named() -> None:
    line = next(line for line in README.splitlines() if line.startswith("Model families:"))
    named = {plain_name(name.strip(" .")) for name in line.partition(":")[2].split(",")}
    assert named == set(map(plain_name, SUPPORTED_MODEL_TYPES))


def save_sample_model(directory: Path, num_layers: int) -> None:
    """The sample model's checkpoint as far as its first so many layers."""
    sample = Path(default_model()[0])
    shutil.copytree(sample, directory, ignore=shutil.ignore_patterns("model.safetensors"))
    config = json.loads((sample / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    kept = {
        name: weights
        for name, weights in load_file(sample / "model.safetensors").items()
        if not (layer := re.search(r"\.layer\.(\d+)\.", name)) or int(layer[1]) < num_layers
    }
    save_file(kept, directory / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module", params=[1, pytest.param(6, marks=pytest.mark.nightly)])
def workplace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the commands of the README make sense, after they were run."""
    directory = tmp_path_factory.mktemp("readme")
    save_sample_model(directory / "path" / "to" / "bert", request.param)
    rows = [{"text": "a short text"}, {"text": "word " * 700}]
    (directory / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (commands,) = [block for block in blocks("sh") if "hdexport build" in block]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in commands.splitlines():
        words = shlex.split(command, comments=True)
        done = subprocess.run(words, cwd=directory, env=os.environ | {"PATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return directory


def test_the_commands_run(workplace: Path) -> None:
    assert (workplace / "embeddings.parquet").stat().st_size > 0


def test_the_example_runs(workplace: Path) -> None:
    (example,) = blocks("python")
    check = "assert vectors.shape == (2, 384)\nassert outputs['sentence_embedding'].shape == (1, 384)\n"
    subprocess.run([sys.executable, "-c", example + check], cwd=workplace, check=True)


def test_make_knows_the_commands() -> None:
    (commands,) = [block for block in blocks("sh") if "make demo" in block]
    for command in commands.splitlines():
        subprocess.run([*shlex.split(command, comments=True), "--dry-run"], cwd=ROOT, check=True, capture_output=True)
