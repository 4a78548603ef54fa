"""How many workers a Ray cluster has room for, and clusters that are not there."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import hdruntime
from hdruntime.bundle.manifest import EngineFile
from hdruntime.errors import BackendUnavailableError, InputError
from hdruntime.ray.cluster import WorkerPlacement, connected, worker_placement
from hdruntime.ray.worker import session_in_worker
from support.comparators import named_case


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_a_cluster_that_is_not_there_is_refused_before_ray_gives_up(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself would try for minutes."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    said = rf"There is no Ray cluster to join at {address}: .*\nStart one: ray start --head"
    with pytest.raises(BackendUnavailableError, match=said), connected(address):
        pass


def test_ray_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(hdruntime.MissingDependencyError, match=r"pip install 'hdexport\[ray\]'"), connected(None):
        pass


CPU_NODE, GPU_NODE = {"CPU": 8.0, "memory": 1e9}, {"CPU": 16.0, "GPU": 2.0}


CLUSTERS = [
    ([CPU_NODE], False, "auto", None, WorkerPlacement(workers=8, cpus=1, gpus=0)),
    ([CPU_NODE, CPU_NODE], False, "auto", 3, WorkerPlacement(workers=4, cpus=3, gpus=0)),
    ([CPU_NODE, GPU_NODE], False, "auto", 8, WorkerPlacement(workers=3, cpus=8, gpus=0)),
    ([CPU_NODE, GPU_NODE], True, "auto", None, WorkerPlacement(workers=2, cpus=1, gpus=1)),
    ([CPU_NODE, GPU_NODE], True, "onnxruntime", 4, WorkerPlacement(workers=6, cpus=4, gpus=0)),
    ([CPU_NODE, GPU_NODE, GPU_NODE], True, "tensorrt", None, WorkerPlacement(workers=4, cpus=1, gpus=1)),
    ([{"GPU": 4.0, "CPU": 2.0}], True, "auto", 1, WorkerPlacement(workers=2, cpus=1, gpus=1)),
    ([{}, {"CPU": 1.0}], False, "auto", 1, WorkerPlacement(workers=1, cpus=1, gpus=0)),
]


def test_a_cluster_is_divided_into_workers(bundle_path: Path) -> None:
    for nodes, engine, backend, threads, expected in CLUSTERS:
        with named_case(nodes, engine, backend, threads, expected):
            bundle = bundle_with_engine(bundle_path) if engine else hdruntime.open_bundle(bundle_path)
            assert worker_placement(nodes, bundle, backend=backend, threads=threads) == expected


def test_a_backend_of_no_name_is_refused_as_that_and_asks_for_no_gpu(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(get_assigned_resources=lambda: {"CPU": 1.0})
    ray = SimpleNamespace(get_runtime_context=lambda: context)
    monkeypatch.setattr("hdruntime.ray.worker.require", lambda name: ray)
    with pytest.raises(InputError, match="backend is 'onnx'"):
        session_in_worker(bundle_path, backend="onnx", threads=None)
    assert worker_placement([CPU_NODE], hdruntime.open_bundle(bundle_path), backend="onnx", threads=None).gpus == 0


def bundle_with_engine(path: Path) -> hdruntime.Bundle:
    bundle = hdruntime.open_bundle(path)
    engine = EngineFile(
        file="e", metadata="p", variant="tensorrt", version="11", precision="float16", architectures=(), profiles=()
    )
    return hdruntime.Bundle(bundle.path, dataclasses.replace(bundle.manifest, engines=(engine,)))


@pytest.mark.parametrize(
    ("backend", "threads", "error", "message"),
    [
        ("tensorrt", None, BackendUnavailableError, "needs a GPU, and the Ray cluster has none"),
        ("auto", 9, InputError, r"A worker of 9 threads .* the largest node of the cluster has 8"),
    ],
)
def test_a_cluster_without_a_place_for_any_worker_is_refused(
    bundle_path: Path, backend: str, threads: int | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        worker_placement([CPU_NODE], hdruntime.open_bundle(bundle_path), backend=backend, threads=threads)
