"""The choice of a backend: the requested one or an error; `auto` logs its reason; engines are rebuilt on request."""

from __future__ import annotations

import dataclasses
import logging
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import hdruntime
from fakes import simulated_tensorrt
from fakes.simulated_device import SimulatedDevice
from hdexport.support.bundle_writer import seal
from hdruntime.backends import choice, rebuilding
from hdruntime.backends.choice import open_runner
from hdruntime.backends.entry import ThisMachine
from hdruntime.backends.onnxruntime import cuda as onnxruntime_cuda
from hdruntime.backends.registry import this_machine
from hdruntime.backends.tensorrt import runner as tensorrt
from hdruntime.bundle.manifest import Backend, EngineFile, ProfileShape
from hdruntime.bundle.manifest_json import manifest_from_json
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import BackendError, BackendUnavailableError, InputError
from hdruntime.gpu.driver import Gpu, no_gpu_reason
from hdruntime.optional import INSTALL_ONNXRUNTIME_CUDA

NOWHERE = ThisMachine(gpu=None, driver=None, versions={Backend.TENSORRT_RTX: "1.7.1.116"})
ADA = ThisMachine(
    gpu=Gpu(name="NVIDIA L4", architecture="sm89", memory_bytes=24 * 2**30),
    driver="580.65.06",
    versions={Backend.TENSORRT_RTX: "1.7.1.116"},
)
HOPPER = dataclasses.replace(ADA, gpu=Gpu(name="NVIDIA H200", architecture="sm90", memory_bytes=141 * 2**30))
BARE = dataclasses.replace(ADA, versions={})
WITH_CUDA = dataclasses.replace(ADA, versions={Backend.ONNXRUNTIME_CUDA: "1.31.1", **ADA.versions})
INSTALL_CUDA = f"Install it with: {re.escape(INSTALL_ONNXRUNTIME_CUDA)}"
PROFILES = (ProfileShape(batch=(1, 1, 8), tokens=(1, 16, 16)),)


def add_engine(path: Path, *, architectures: tuple[str, ...]) -> Bundle:
    """Add an engine that no TensorRT would load."""
    version = ADA.versions[Backend.TENSORRT_RTX]
    return simulated_tensorrt.add_engine(
        path, PROFILES, variant="tensorrt_rtx", version=version, architectures=architectures
    )


class _Loaded:
    """Replaces the runner of an engine, which needs a GPU."""

    def __init__(self, bundle: Bundle, engine: EngineFile, *, backend: Backend, **options: object) -> None:
        self.engine, self.backend, self.options = engine, backend, options


class _OnGpu:
    """Replaces ONNX Runtime's runner on a GPU."""

    backend = Backend.ONNXRUNTIME_CUDA

    def __init__(self, bundle: Bundle, *, gpu: hdruntime.GpuOptions, threads: int | None) -> None:
        self.gpu, self.threads = gpu, threads


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines load."""
    monkeypatch.setattr(tensorrt, "TensorRtRunner", _Loaded)


@pytest.fixture
def cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime finds a GPU."""
    monkeypatch.setattr(onnxruntime_cuda, "OnnxRuntimeCudaRunner", _OnGpu)


def opened(bundle: Bundle, backend: str = "auto", *, machine: ThisMachine = ADA, **options: Any) -> Any:
    """The runner for the bundle on a machine, an L4 by default."""
    return open_runner(bundle, backend, **{"threads": None, "machine": machine, **options})[1]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log, from level INFO on."""
    caplog.set_level(logging.INFO, logger="hdruntime")
    return caplog


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in log.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("backend", "machine", "message"),
    [
        ("tensorrt_rtx", NOWHERE, r".*CUDA finds no GPU\.(.|\n)*Use the backend onnxruntime"),
        (
            "tensorrt_rtx",
            ADA,
            r".*The engine was built for GPUs of sm86; this GPU \(NVIDIA L4\) is sm89\.\n"
            "Rebuild .*: hdexport rebuild .* --target tensorrt-rtx",
        ),
        ("tensorrt_rtx", BARE, r".*is not installed\.(.|\n)*Install it with: .*hdexport\[rtx\]"),
        ("tensorrt", ADA, r"The bundle has no tensorrt engine\."),
        ("onnxruntime_cuda", ADA, f"No ONNX Runtime that was built with CUDA is installed.\n{INSTALL_CUDA}"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_with_reason_and_remedy(
    bundle_path: Path, log: pytest.LogCaptureFixture, backend: str, machine: ThisMachine, message: str
) -> None:
    bundle = add_engine(bundle_path, architectures=("sm86",))
    with pytest.raises(BackendUnavailableError, match=f"cannot run .* on this machine. {message}") as raised:
        opened(bundle, backend, machine=machine)
    reason = choice.unavailable_reason(bundle, Backend(backend), machine=machine)
    assert str(raised.value) == str(reason.error(backend, bundle))
    assert str(raised.value).endswith(str(reason))
    assert choice.unavailable_reason(bundle, Backend.ONNXRUNTIME_CUDA, machine=WITH_CUDA) is None
    assert opened(bundle, machine=machine).backend is Backend.ONNXRUNTIME
    assert "auto: not tensorrt_rtx. " in log.text


@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize("backend", ["auto", "tensorrt_rtx"])
def test_an_engine_that_fits_is_taken(bundle_path: Path, backend: str, log: pytest.LogCaptureFixture) -> None:
    bundle = add_engine(bundle_path, architectures=("sm86", "sm89"))
    assert opened(bundle, backend).backend is Backend.TENSORRT_RTX
    assert ("chose tensorrt_rtx" in log.text) is (backend == "auto")


def test_an_engine_that_should_load_and_does_not_causes_a_warning(
    bundle_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise BackendError("the plan is damaged")

    monkeypatch.setattr(tensorrt, "TensorRtRunner", fail)
    bundle = add_engine(bundle_path, architectures=("sm89",))
    assert opened(bundle).backend is Backend.ONNXRUNTIME
    assert "tensorrt_rtx should run here and does not: the plan is damaged" in log.text
    with pytest.raises(BackendError, match="the plan is damaged"):
        opened(bundle, "tensorrt_rtx")


# ONNX Runtime on the GPU.


@pytest.mark.usefixtures("cuda_starts")
@pytest.mark.parametrize(("backend", "architectures"), [("auto", ("sm86",)), ("onnxruntime_cuda", None)])
def test_onnx_runtime_takes_the_gpu_if_no_engine_fits(
    bundle_path: Path, backend: str, architectures: tuple[str, ...] | None, log: pytest.LogCaptureFixture
) -> None:
    bundle = open_bundle(bundle_path) if architectures is None else add_engine(bundle_path, architectures=architectures)
    gpu = hdruntime.GpuOptions(device=1, memory_limit_bytes=2**30)
    runner = opened(bundle, backend, machine=WITH_CUDA, threads=3, gpu=gpu)
    assert isinstance(runner, _OnGpu)
    assert (runner.gpu, runner.threads) == (gpu, 3)
    assert ("chose onnxruntime_cuda" in log.text) is (backend == "auto")
    assert not warnings(log)


@pytest.mark.usefixtures("loads", "cuda_starts")
def test_an_engine_that_fits_comes_before_onnx_runtime_but_has_no_memory_limit(
    bundle_path: Path, log: pytest.LogCaptureFixture
) -> None:
    bundle = add_engine(bundle_path, architectures=("sm89",))
    assert opened(bundle, machine=WITH_CUDA).backend is Backend.TENSORRT_RTX
    limit = hdruntime.GpuOptions(memory_limit_bytes=2**30)
    with pytest.raises(BackendUnavailableError, match=r"takes no memory_limit_bytes(.|\n)*backend onnxruntime_cuda"):
        opened(bundle, "tensorrt_rtx", machine=WITH_CUDA, gpu=limit)
    assert opened(bundle, machine=WITH_CUDA, gpu=limit).backend is Backend.ONNXRUNTIME_CUDA
    assert "tensorrt_rtx takes no memory_limit_bytes" in log.text


@pytest.mark.parametrize("has_engine", [True, False])
def test_an_unused_gpu_causes_a_warning_with_the_command(
    bundle_path: Path, log: pytest.LogCaptureFixture, has_engine: bool
) -> None:
    bundle = add_engine(bundle_path, architectures=("sm86",)) if has_engine else open_bundle(bundle_path)
    assert opened(bundle).backend is Backend.ONNXRUNTIME
    (message,) = warnings(log)
    assert "chose onnxruntime, on the CPU, although there is a GPU (NVIDIA L4)" in message
    assert f"  onnxruntime_cuda: {INSTALL_ONNXRUNTIME_CUDA}" in message
    assert (f"  tensorrt_rtx: hdexport rebuild {bundle_path} --target tensorrt-rtx" in message) is has_engine
    assert ("tensorrt_rtx cannot run here. The engine was built for GPUs of sm86; this GPU" in message) is has_engine


def test_without_a_gpu_the_cpu_is_taken_without_a_warning(bundle_path: Path, log: pytest.LogCaptureFixture) -> None:
    for bundle in (open_bundle(bundle_path), add_engine(bundle_path, architectures=("sm89",))):
        _, runner, reason = open_runner(bundle, "auto", threads=None, machine=NOWHERE)
        assert (runner.backend, reason) == (
            Backend.ONNXRUNTIME,
            no_gpu_reason(()) + " The bundle has no graph for OpenVINO.",
        )
    assert not warnings(log)


def test_onnx_runtime_that_should_find_the_gpu_and_does_not_causes_a_warning(
    bundle_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is simulated, and ONNX Runtime is not: it has no CUDA here."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", SimulatedDevice())  # type: ignore[misc]
    if "onnxruntime_cuda" in this_machine().versions:
        pytest.skip("there is a GPU")
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"):
        runner = opened(open_bundle(bundle_path), machine=WITH_CUDA)
    assert runner.backend is Backend.ONNXRUNTIME
    assert "onnxruntime_cuda should run here and does not: ONNX Runtime" in log.text


def test_an_unknown_backend_lists_the_valid_ones(bundle_path: Path) -> None:
    valid = "auto, tensorrt, tensorrt_rtx, tensorrt_lean, onnxruntime_cuda, openvino, onnxruntime"
    with pytest.raises(InputError, match=f"backend is 'cuda'; it must be one of {valid}"):
        hdruntime.load(bundle_path, "cuda")


# Rebuilding. The command that builds is tested with the command line; here a function leaves the same files.


@pytest.fixture
def rebuilds(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; each makes the bundle's engine fit an L4."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        add_engine(Path(command[4]), architectures=("sm89",))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(rebuilding.subprocess, "run", run)
    return commands


@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize(("backend", "had_engine"), [("auto", True), ("tensorrt_rtx", False)])
def test_an_engine_is_rebuilt_on_request(
    bundle_path: Path, rebuilds: list[list[str]], backend: str, had_engine: bool
) -> None:
    bundle = add_engine(bundle_path, architectures=("sm86",)) if had_engine else open_bundle(bundle_path)
    rebuilt, runner, _ = open_runner(bundle, backend, threads=None, rebuild=True, machine=ADA)
    assert runner.backend is Backend.TENSORRT_RTX
    assert rebuilt.manifest.engines[0].architectures == ("sm89",)
    assert rebuilds == [[sys.executable, "-m", "hdexport", "rebuild", str(bundle_path), "--target", "tensorrt-rtx"]]
    opened(rebuilt, backend, rebuild=True)
    assert len(rebuilds) == 1, "an engine that runs is not rebuilt"


@pytest.mark.usefixtures("loads")
def test_simultaneous_requests_rebuild_once(bundle_path: Path, rebuilds: list[list[str]]) -> None:
    bundle = open_bundle(bundle_path)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: opened(bundle, rebuild=True), range(4)))
    assert len(rebuilds) == 1


def test_without_a_gpu_nothing_is_rebuilt(bundle_path: Path, rebuilds: list[list[str]]) -> None:
    assert opened(open_bundle(bundle_path), rebuild=True, machine=NOWHERE).backend is Backend.ONNXRUNTIME
    assert rebuilds == []


@pytest.mark.parametrize(
    ("machine", "backend", "why"),
    [
        (ADA, "tensorrt", "tensorrt is not installed"),
        (HOPPER, "tensorrt_rtx", "tensorrt_rtx supports no GPU of sm90"),
    ],
)
def test_a_rebuild_that_is_not_possible_here_names_the_commands(
    bundle_path: Path, machine: ThisMachine, backend: str, why: str
) -> None:
    message = (
        rf"cannot be rebuilt on this machine. {why}.\nTo use the GPU:\n  tensorrt: pip install 'hdexport.tensorrt.'"
    )
    with pytest.raises(BackendUnavailableError, match=message):
        opened(open_bundle(bundle_path), backend, machine=machine, rebuild=True)


def test_a_rebuild_that_does_not_help_is_an_error(bundle_path: Path, rebuilds: list[list[str]]) -> None:
    blackwell = dataclasses.replace(ADA, gpu=dataclasses.replace(ADA.gpu, architecture="sm120"))
    with pytest.raises(
        BackendUnavailableError, match=r"was rebuilt .* The engine was built for GPUs of sm89; .* sm120"
    ):
        opened(open_bundle(bundle_path), rebuild=True, machine=blackwell)


@pytest.mark.usefixtures("loads")
def test_the_real_command_rebuilds(bundle_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_libs", reason="TensorRT-RTX is not installed: pip install 'hdexport[rtx]'")
    machine = dataclasses.replace(ADA, versions=this_machine().versions)
    bundle, runner, _ = open_runner(open_bundle(bundle_path), "auto", threads=None, rebuild=True, machine=machine)
    assert runner.backend is Backend.TENSORRT_RTX
    assert "sm89" in bundle.manifest.engines[0].architectures


def test_a_failed_rebuild_shows_the_reason(bundle_path: Path) -> None:
    """The real command, on a bundle with an invalid graph."""
    (bundle_path / "model.onnx").write_bytes(b"no graph")
    seal(bundle_path, manifest_from_json((bundle_path / "manifest.json").read_bytes()))
    with pytest.raises(BackendError, match=r"(?s)Rebuilding the engine of .* for tensorrt_rtx failed:\n.*model\.onnx"):
        opened(open_bundle(bundle_path), rebuild=True)
