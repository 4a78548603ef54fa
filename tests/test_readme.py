"""The README: its table is generated, its commands and its example run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from hdexport.attention.registry import attention_types
from hdexport.families import SUPPORTED_MODEL_TYPES
from hdexport.lowering.lowering import ENGINES, Lowering
from hdplugins import OPERATORS
from hdplugins.attention.plugin_spec import plugin_spec_of
from hdplugins.tensorrt.plugins import plugin_operators
from hdruntime.backends.onnxruntime import CPU_LOWERING
from hdruntime.backends.openvino import OPENVINO_LOWERING
from hdruntime.bundle.manifest import Dtype, Task
from support.commands import run_here
from support.pages import ROOT, code_blocks, page
from support.sample_model import environment, save_sample_model
from support.tiny_models import save_tiny_model

README = page("README.md")


def blocks(language: str) -> list[str]:
    return [block.code for block in code_blocks(README, language)]


def support_table() -> str:
    lines = [
        "| operator | dtypes of the function body | ONNX Runtime CPU | OpenVINO | TensorRT, TensorRT-RTX |",
        "|---|---|---|---|---|",
    ]
    lowerings = {lowering.operator: lowering for kind in attention_types() for lowering in kind.lowerings}
    for name, operator in OPERATORS.items():
        lowering = lowerings.get(name, Lowering())
        function = ", ".join(get_args(Dtype)) if operator.has_implementation("onnx_functions") else "-"
        fused = lowering.fused.get(CPU_LOWERING)
        cpu = f"fused in {', '.join(fused)}" if fused else "standard, linear memory"
        cpu += "; fused for short inputs" * lowering.fuses_short_sequences
        is_plugin = operator in plugin_operators()
        in_engines = plugin_spec_of(operator).DTYPES if is_plugin else lowering.fused.get(ENGINES)
        kind = "plugin" if is_plugin else "fused"
        engine = f"{kind} in {', '.join(in_engines)}; else standard" if in_engines else "standard"
        in_openvino = "fused" if OPENVINO_LOWERING in lowering.fused else "standard"
        lines.append(f"| {name} | {function} | {cpu} | {in_openvino} | {engine} |")
    return "\n".join(lines)


def test_the_support_table_lists_the_operators() -> None:
    found = re.search(r"<!-- support table -->\n(.*?)\n<!-- end of support table -->", README, re.DOTALL)
    assert found is not None
    assert found.group(1) == support_table()


def plain_name(name: str) -> str:
    """BigBird-Pegasus and bigbird_pegasus are one, as are Transformer-XL and transfo-xl."""
    return name.lower().replace("transformer", "transfo").replace("-", "").replace("_", "").replace(" ", "")


def test_every_supported_family_is_named() -> None:
    line = next(line for line in README.splitlines() if line.startswith("Model families:"))
    named = {plain_name(name.strip(" .")) for name in line.partition(":")[2].split(",")}
    assert named == set(map(plain_name, SUPPORTED_MODEL_TYPES))


BUILD, *OTHERS = next(block for block in blocks("sh") if "hdexport build" in block).splitlines()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the commands of the README make sense, after they were run here on a tiny BERT."""
    directory = tmp_path_factory.mktemp("readme")
    save_tiny_model(directory / "path" / "to" / "bert", "bert", Task.FEATURE_EXTRACTION)
    write_documents(directory)
    for command, left_out in ((BUILD, ["--target", "onnx", "--verify", "none"]), *((other, []) for other in OTHERS)):
        done = run_here(*shlex.split(command, comments=True)[1:], *left_out, cwd=directory)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return directory


def write_documents(directory: Path) -> None:
    rows = [{"text": "a short text"}, {"text": "word " * 700}]
    (directory / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_the_commands_run(workplace: Path) -> None:
    assert (workplace / "embeddings.parquet").stat().st_size > 0


@pytest.mark.nightly
def test_the_commands_run_as_they_are_typed_and_the_build_is_verified(tmp_path: Path) -> None:
    """In processes, on the whole sample model, with an engine where one can be built."""
    save_sample_model(tmp_path / "path" / "to" / "bert", 6)
    write_documents(tmp_path)
    for command in (BUILD, *OTHERS):
        words = shlex.split(command, comments=True)
        done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_the_example_runs(workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("python")
    assert len([line for line in example.splitlines() if line]) <= 8
    monkeypatch.chdir(workplace)
    exec(example, {})
    assert sorted(re.findall(r"\d", capsys.readouterr().out)) == ["0", "1"]


def test_pandas_and_duckdb_read_the_embeddings(workplace: Path) -> None:
    """DuckDB also where rows failed, whose embedding is NULL; the model here has 32 dimensions, not 384."""
    (expression,) = re.findall(r"`(np\.stack\(pd\..*?)`", README)
    (query,) = re.findall(r"`(SELECT .*?)`", README)
    program = f"""
import duckdb, numpy as np, pandas as pd
matrix = {expression}
query = {query!r}.replace("384", "32")
print(*matrix.shape, *(duckdb.execute(query, {{"query": row}}).fetchone()[0] for row in matrix))
failed = "(SELECT 9 AS id, NULL AS embedding UNION ALL SELECT id, embedding FROM 'embeddings.parquet')"
query = query.replace("'embeddings.parquet'", failed)
print(duckdb.execute(query, {{"query": matrix[1]}}).fetchall())
"""
    # A process of its own: DuckDB complains at the end of this one, which has frozen its garbage.
    done = subprocess.run([sys.executable, "-c", program], cwd=workplace, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["2 32 0 1", "[(1,), (0,), (9,)]"], done.stderr


def test_make_knows_the_commands() -> None:
    (commands,) = [block for block in blocks("sh") if "make demo" in block]
    for command in commands.splitlines():
        subprocess.run([*shlex.split(command, comments=True), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_it_is_short_and_its_links_are_relative_and_exist() -> None:
    assert len(README.splitlines()) <= 120
    assert "://" not in README
    links = re.findall(r"\]\((.*?)\)", README)
    assert links
    for link in links:
        path, _, heading = link.partition("#")
        assert (ROOT / path).exists(), link
        assert not heading or heading in headings(page(path)), link


def headings(text: str) -> set[str]:
    """The names that GitHub and the site link a page's headings by."""
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"(?m)^#+ (.*)$", text)}
