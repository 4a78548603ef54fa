"""Optimum as a baseline: what it is asked, and what is made of its answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from hdexport.bench.run.worker import open_case
from hdruntime.errors import ExportError

Optimum = Callable[[str], None]


@pytest.fixture
def fake_optimum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Optimum:
    """Put a script of that name first on the PATH: (Python code that has its arguments in `given`) -> None."""

    def make(code: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        script = folder / "optimum-cli"
        script.write_text(f"#!{sys.executable}\nimport json, pathlib, sys\ngiven = sys.argv[1:]\n{code}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    return make


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("sys.exit('Traceback\\nValueError: a led is not supported\\n')", "exit code 1: ValueError: a led is not supp"),
        ("(pathlib.Path(given[-1]) / 'encoder_model.onnx').touch()", "wrote no model.onnx, but encoder_model.onnx"),
    ],
)
def test_optimums_failures_have_its_reason(workshop: Any, fake_optimum: Optimum, code: str, message: str) -> None:
    fake_optimum(code)
    case = workshop("bert")
    with pytest.raises(ExportError, match=message):
        case.artefact("optimum")
    assert [path.name for path in case.folder.iterdir() if "optimum" in path.name] == []


@pytest.mark.parametrize(
    ("of_bundle", "options"),
    [
        (("bert", "sentence-similarity"), ["--task", "sentence-similarity"]),
        (("bert", "question-answering"), ["--task", "question-answering", "--library-name", "transformers"]),
    ],
)
def test_optimum_gets_the_extended_checkpoint_and_the_task(
    workshop: Any, fake_optimum: Optimum, of_bundle: tuple[str, ...], options: list[str]
) -> None:
    fake_optimum("sys.exit(json.dumps(given))")
    case = workshop(*of_bundle)
    with pytest.raises(ExportError) as raised:
        case.artefact("optimum")
    *given, output = json.loads(str(raised.value).partition(": ")[2])
    assert given == ["export", "onnx", "--model", str(case.folder / "checkpoint"), *options]
    assert Path(output).parent == case.folder


def test_a_graph_of_others_is_run_by_the_manifests_names(workshop: Any, tmp_path: Path) -> None:
    # As optimum makes it with token types, which the bundle does not have, and, beside sentence-transformers, with the
    # tokens' vectors under their name in that library.
    feature, graph = workshop("bert", "sentence-similarity"), workshop("bert").subject.bundle / "model.onnx"
    model = ir.load(graph)
    model.graph.outputs[0].name = "token_embeddings"
    ir.save(model, tmp_path / "of_sentences.onnx", external_data="of_sentences.onnx.data")
    for path in (graph, tmp_path / "of_sentences.onnx"):
        assert list(open_case(feature.spec("optimum", 1, 65, path)).call()) == ["last_hidden_state"]
    next(value for value in model.graph.inputs if value.name == "token_type_ids").name = "segment_ids"
    ir.save(model, tmp_path / "renamed.onnx", external_data="renamed.onnx.data")
    with pytest.raises(ExportError, match="needs the inputs segment_ids; the model has no such inputs"):
        open_case(feature.spec("optimum", 1, 65, tmp_path / "renamed.onnx"))
    with pytest.raises(ExportError, match="has the outputs last_hidden_state and none of the bundle's outputs"):
        open_case(workshop("bert", "question-answering").spec("optimum", 1, 65, graph))
