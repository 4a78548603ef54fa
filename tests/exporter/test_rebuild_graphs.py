"""A bundle gets graphs for OpenVINO and int8 later, from itself alone: those that a build writes."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from hdexport.cli import main
from hdexport.quantize import Int8Options
from hdexport.rebuild import RebuildOptions, rebuild
from hdexport.support.bundle_writer import write_manifest
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.verification import GraphVerification, Skip, SkipCause, Status, VerificationRecord

pytest.importorskip("openvino")

OPENVINO = ["openvino.onnx", "openvino_unpadded.onnx"]


def bytes_of(path: Path, names: list[str]) -> list[bytes]:
    return [(path / name).read_bytes() for name in names]


def test_graphs_for_openvino_are_those_of_a_build(tiny_bundles, tmp_path: Path) -> None:
    plain, built = tiny_bundles("bert"), tiny_bundles("bert", openvino=True)
    manifest = rebuild(RebuildOptions(bundle=plain.path, output=tmp_path / "new", targets=("openvino",)))
    assert manifest == open_bundle(tmp_path / "new").manifest
    assert manifest.graphs == built.manifest.graphs
    assert bytes_of(tmp_path / "new", OPENVINO) == bytes_of(built.path, OPENVINO)
    assert not any((plain.path / name).exists() for name in OPENVINO)


def test_int8_replaces_int8_and_nothing_else(
    openvino_bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # All of the standard library's take a second to parse, each time.
    monkeypatch.setattr("hdexport.quantize.texts.docstrings", lambda: ["What a function says of itself."])
    bundle = Path(shutil.copytree(openvino_bundles("bert").path, tmp_path / "bundle"))
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"the text number {number} is one of few" for number in range(8)))
    options = RebuildOptions(bundle=bundle, output=bundle, int8=Int8Options(calibrate=texts))
    before = open_bundle(bundle).manifest
    once = rebuild(options)
    assert main(["rebuild", str(bundle), "--int8", "--calibrate", str(texts)]) == 0
    assert "\nonnxruntime_cpu_int8.onnx, openvino_int8.onnx, openvino_unp" in capsys.readouterr().out
    twice = open_bundle(bundle).manifest
    assert once.graphs == twice.graphs
    assert [graph for graph in twice.graphs if graph.dtype != "int8"] == list(before.graphs)
    assert [graph.file for graph in twice.graphs if graph.dtype == "int8"] == [
        "onnxruntime_cpu_int8.onnx", "openvino_int8.onnx", "openvino_unpadded_int8.onnx",
    ]  # fmt: skip
    assert {name: twice.files[name] for name in before.files} == before.files
    # Graphs for OpenVINO are written again beside it.
    again = rebuild(RebuildOptions(bundle=bundle, output=bundle, targets=("openvino",)))
    assert set(again.graphs) == set(twice.graphs)
    assert again.files == twice.files


def test_checks_of_a_graph_end_with_the_graph(
    openvino_bundles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = open_bundle(shutil.copytree(openvino_bundles("bert").path, tmp_path / "a bundle"))
    graphs = {
        name: GraphVerification(status=Status.PASS, files=tuple(files), checks=3, passed=3, tokens=(1, 2))
        for name, files in {"model.onnx": ["model.onnx"], " and ".join(OPENVINO): OPENVINO}.items()
    }
    found = VerificationRecord(passed=True, graphs=graphs)
    write_manifest(bundle.path, dataclasses.replace(bundle.manifest, verification=found))
    assert main(["rebuild", str(bundle.path), "--target", "openvino"]) == 0
    assert capsys.readouterr().out == (
        "openvino.onnx, openvino_unpadded.onnx: not yet verified\n"
        f"Compare with PyTorch: hdexport verify '{bundle.path}'\n"
    )
    assert open_bundle(bundle.path).manifest.verification == VerificationRecord(
        passed=True,
        graphs={"model.onnx": graphs["model.onnx"]},
        skipped=(Skip(cause=SkipCause.REBUILT, graph="openvino.onnx and openvino_unpadded.onnx"),),
    )


def test_options_of_engines_are_refused_where_only_graphs_are_added(
    tiny_bundles, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tiny_bundles("bert").path)
    assert main(["rebuild", path, "--target", "openvino", "--sm", "89"]) == 1
    assert "--sm describes an engine, but no engine is built: only graphs for CPUs are added" in capsys.readouterr().err
    assert main(["rebuild", path, "--calibrate", "texts.txt"]) == 1
    assert "--calibrate is for int8 graphs" in capsys.readouterr().err
