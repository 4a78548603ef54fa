"""Bundles by name on the hub: downloaded once, checked, only the files of the backend, and from the cache offline.

The client is the real one, and the hub a server on this machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hdexport.cli
import hdruntime
import hdruntime.hub
from hdexport.support.bundle_writer import seal
from hdruntime.bundle.manifest import GraphFile
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BundleCorruptError, BundleError, BundleNotFoundError
from hdruntime.hub import opened_bundle
from support.hub_server import HubServer, served_hub
from support.tiny_bundle import engine_file, make_bundle

NAME = "someone/tiny-bundle"
TEXTS = ["long documents", "are read whole."]

OF_ALL = {"manifest.json", "config.json", "tokenizer.json"}
GRAPHS = {"model.onnx", "model.onnx.data", "onnxruntime_cpu.onnx"}
INT8 = {"onnxruntime_cpu_int8.onnx", "int8.onnx.data"}
ENGINES = {"engines/rtx.engine", "engines/trt.engine"}
METADATA = {"engines/rtx.json", "engines/trt.json"}
KERNELS = {"kernels/sm_80.cubin"}
LIBRARY = {"2_Dense/model.safetensors"}


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with engines, kernels, graphs in int8 and a layer that only sentence-transformers reads."""
    path = make_bundle(
        tmp_path_factory.mktemp("pushed") / "bundle", task="sentence-similarity", cpu_graph=True, external_data=True
    )
    for name in ENGINES | KERNELS | INT8 | LIBRARY | METADATA:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(name.encode())
    manifest = open_bundle(path).manifest
    int8 = GraphFile(file="onnxruntime_cpu_int8.onnx", lowering="onnxruntime_cpu", dtype="int8")
    engines = (engine_file("rtx"), engine_file("trt", variant="tensorrt"))
    seal(path, dataclasses.replace(manifest, graphs=(*manifest.graphs, int8), engines=engines))
    return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with served_hub(tmp_path, monkeypatch) as server:
        yield server


def names(hub: HubServer) -> list[str]:
    """Names of the files that were downloaded, with their folders."""
    return sorted(path.partition("/resolve/")[2].partition("/")[2] for path in hub.asked if "/resolve/" in path)


@pytest.mark.parametrize("name", [NAME, f"{NAME}@v1"])
def test_a_bundle_is_downloaded_once_and_gives_its_answers(hub: HubServer, pushed: Path, name: str) -> None:
    hub.push(NAME, pushed, branch="v1" if "@" in name else "main")
    with hdruntime.load(pushed, "onnxruntime") as session:
        expected = session.embed(TEXTS)
    for _ in range(2):
        with hdruntime.load(name, "onnxruntime") as session:
            assert np.array_equal(session.embed(TEXTS), expected)
    with hdruntime.SentenceEncoder(name, backend="onnxruntime") as encoder:
        assert np.array_equal(encoder.encode(TEXTS), expected)
    assert names(hub) == sorted(OF_ALL | GRAPHS | METADATA)


@pytest.mark.parametrize(
    ("backend", "precision", "gpus", "wanted"),
    [
        ("auto", "auto", 0, GRAPHS),
        ("auto", "auto", 1, GRAPHS | ENGINES | KERNELS),
        ("onnxruntime", "float32", 1, GRAPHS),
        ("onnxruntime_cuda", "auto", 0, GRAPHS | KERNELS),
        ("onnxruntime", "int8", 0, GRAPHS | INT8),
        ("openvino", "bfloat16", 1, GRAPHS),
        ("tensorrt", "auto", 0, {"engines/trt.engine"} | KERNELS),
        ("tensorrt_lean", "auto", 1, {"engines/trt.engine"} | KERNELS),
        ("tensorrt_rtx", "auto", 1, {"engines/rtx.engine"} | KERNELS),
    ],
)
def test_only_the_files_of_the_backend_are_downloaded(
    hub: HubServer,
    pushed: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    precision: str,
    gpus: int,
    wanted: set[str],
) -> None:
    hub.push(NAME, pushed)
    monkeypatch.setattr(hdruntime.hub, "gpus", lambda: [None] * gpus)
    bundle = opened_bundle(NAME, hdruntime.Backend(backend) if backend != "auto" else backend, precision)
    assert names(hub) == sorted(OF_ALL | METADATA | wanted)
    assert bundle.manifest == open_bundle(pushed).manifest
    for name in bundle.absent:
        with pytest.raises(BundleError, match=rf"{name} .* was not downloaded"):
            bundle.file(name)


def test_a_job_reads_a_bundle_by_its_name_and_is_the_job_of_its_directory(
    hub: HubServer, pushed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.push(NAME, pushed)
    Path("texts.txt").write_text("\n".join(TEXTS))
    run = ["texts.txt", "-o", "vectors.npy", "--backend", "onnxruntime"]
    assert hdexport.cli.main(["run", NAME, *run]) == 0
    vectors = np.load("vectors.npy")
    assert hdexport.cli.main(["run", str(pushed), *run]) == 0, "the same bundle, whose job is done"
    assert hdexport.cli.main(["run", str(pushed), *run, "--force", "--restart"]) == 0
    assert np.array_equal(np.load("vectors.npy"), vectors)


def test_offline_a_bundle_comes_from_the_cache(
    hub: HubServer, pushed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants as constants

    commit = hub.push(NAME, pushed)
    opened_bundle(NAME, "onnxruntime")
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in (NAME, f"{NAME}@{commit}"):
        with hdruntime.load(name, "onnxruntime") as session:
            assert session.embed(TEXTS).shape == (2, 4)
    for name, backend in ((NAME, "tensorrt_rtx"), ("someone/other", "onnxruntime")):
        with pytest.raises(BundleNotFoundError, match=rf"{name}.* could not be downloaded.*\n.*HF_HUB_OFFLINE=0"):
            opened_bundle(name, backend)
    assert hub.asked == []


def test_a_download_that_was_cut_off_is_resumed_and_a_damaged_one_refused(
    hub: HubServer, pushed: Path, tmp_path: Path
) -> None:
    hub.push(NAME, pushed)
    path = opened_bundle(NAME, "onnxruntime").path
    (path / "model.onnx.data").resolve().unlink()
    hub.asked.clear()
    assert opened_bundle(NAME, "onnxruntime").path == path
    assert names(hub) == ["model.onnx.data"]
    blob = (path / "model.onnx.data").resolve()
    blob.write_bytes(b"\0" * blob.stat().st_size)
    with pytest.raises(BundleCorruptError, match=r"model.onnx.data of the bundle .* has changed"):
        opened_bundle(NAME, "onnxruntime")


def test_what_is_no_bundle_is_said_with_the_remedy(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    hub.push(NAME, tmp_path / "checkpoint")
    with pytest.raises(BundleNotFoundError, match=rf"is no bundle.\n.*hdexport build {NAME} -o BUNDLE"):
        hdruntime.load(NAME)
    with pytest.raises(BundleNotFoundError, match=rf"bundle {NAME}@v9, .*\n.*Check the name, the revision"):
        hdruntime.load(f"{NAME}@v9")
    with pytest.raises(BundleNotFoundError, match="There is no bundle at no/such/bundle: it does not exist"):
        hdruntime.load("no/such/bundle")


def test_a_directory_of_that_name_comes_first(hub: HubServer, pushed: Path) -> None:
    Path("someone").mkdir()
    shutil.copytree(pushed, NAME)
    assert opened_bundle(NAME).path == Path(NAME).resolve()
    assert hub.asked == []


def test_the_hubs_variables_are_those_of_its_client(hub: HubServer, pushed: Path, tmp_path: Path) -> None:
    """``HF_ENDPOINT``, ``HF_HOME``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` in a process of its own."""
    hub.push(NAME, pushed)
    code = "import sys, hdruntime; print(hdruntime.load(sys.argv[1], 'onnxruntime').embed(['long']).shape)"
    variables = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_secret"}
    for offline in ("0", "1"):
        environment = {**os.environ, **variables, "HF_HUB_OFFLINE": offline}
        done = subprocess.run([sys.executable, "-c", code, NAME], capture_output=True, text=True, env=environment)
        assert done.stdout == "(1, 4)\n", done.stderr
    assert json.loads(next((tmp_path / "home").rglob("manifest.json")).read_text())["name"] == "tiny"
    assert "Bearer hf_secret" in hub.tokens


def test_without_a_network_what_is_in_the_cache_loads_and_the_rest_is_said(
    hub: HubServer, pushed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    hub.push(NAME, pushed)
    opened_bundle(NAME, "onnxruntime")
    with HubServer() as gone:
        pass
    monkeypatch.setattr(constants, "ENDPOINT", gone.address)
    assert opened_bundle(NAME, "onnxruntime").manifest.name == "tiny"
    with pytest.raises(BundleNotFoundError, match=r"someone/other.* could not be downloaded.*\n.*the connection"):
        opened_bundle("someone/other")
