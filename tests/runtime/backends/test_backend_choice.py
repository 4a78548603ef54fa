"""Which backend runs a bundle: what is asked for or nothing; `auto` says why; engines are rebuilt when asked."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import hdruntime
from hdruntime.backends import choice
from hdruntime.backends.choice import open_runner
from hdruntime.bundle.manifest import Backend, EngineFile, ProfileShape
from hdruntime.bundle.manifest_json import manifest_from_json
from hdruntime.bundle.passport import ThisMachine, this_machine
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.bundle.writer import seal
from hdruntime.errors import BackendError, BackendUnavailableError, InputError
from hdruntime.gpu.driver import Gpu, why_no_gpu
from hdruntime.optional import INSTALL_ONNXRUNTIME_CUDA

NOWHERE = ThisMachine(gpu=None, driver=None, versions={Backend.TENSORRT_RTX: "1.7.1.116"})
ADA = ThisMachine(
    gpu=Gpu(name="NVIDIA L4", architecture="sm89", memory_bytes=24 * 2**30),
    driver="580.65.06",
    versions={Backend.TENSORRT_RTX: "1.7.1.116"},
)
HOPPER = dataclasses.replace(ADA, gpu=Gpu(name="NVIDIA H200", architecture="sm90", memory_bytes=141 * 2**30))
BUILT_ON = {"platform": "Linux", "driver": None, "gpu": None, "date": "2026-11-21"}


def add_engine(path: Path, *, architectures: tuple[str, ...], flavour: str = "tensorrt_rtx") -> Bundle:
    """Add what the manifest calls an engine; no TensorRT would load it."""
    engine = EngineFile(
        file=f"engines/{flavour}.engine",
        passport=f"engines/{flavour}.json",
        flavour=flavour,
        version="1.7.1.116",
        precision="float16",
        architectures=architectures,
        profiles=(ProfileShape(batch=(1, 1, 8), tokens=(1, 16, 16)),),
    )
    (path / "engines").mkdir(exist_ok=True)
    (path / engine.file).write_text("no engine")
    passport = {"plugins": {}, "engine_sha256": "", "onnx_sha256": {}, "built_on": BUILT_ON}
    (path / engine.passport).write_text(json.dumps(passport))
    seal(path, dataclasses.replace(open_bundle(path).manifest, engines=(engine,)))
    return open_bundle(path)


class _Loaded:
    """Stands for the runner of an engine, which nothing can execute without a GPU."""

    def __init__(self, bundle: Bundle, engine: EngineFile, *, backend: Backend, **options: object) -> None:
        self.engine, self.backend, self.options = engine, backend, options


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines load."""
    from hdruntime.backends import tensorrt

    monkeypatch.setattr(tensorrt, "TensorRtRunner", _Loaded)


def test_auto_takes_the_cpu_where_the_bundle_has_no_engine(bundle_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hdruntime"):
        _, runner, _ = open_runner(open_bundle(bundle_path), "auto", threads=None, machine=ADA)
    assert runner.backend is Backend.ONNXRUNTIME
    assert "chose onnxruntime, on the CPU, although there is a GPU (NVIDIA L4)" in caplog.text


@pytest.mark.parametrize(
    ("machine", "reason"),
    [(NOWHERE, "CUDA sees no GPU here"), (ADA, r"it is for GPUs of sm86, and this one \(NVIDIA L4\) is sm89")],
)
def test_an_engine_that_does_not_fit_the_machine_is_refused_with_the_reason(
    bundle_path: Path, caplog: pytest.LogCaptureFixture, machine: ThisMachine, reason: str
) -> None:
    bundle = add_engine(bundle_path, architectures=("sm86",))
    with caplog.at_level(logging.INFO, logger="hdruntime"):
        _, runner, _ = open_runner(bundle, "auto", threads=None, machine=machine)
    assert runner.backend is Backend.ONNXRUNTIME
    assert "auto: not tensorrt_rtx: " in caplog.text
    remedy = "hdexport rebuild .* --target tensorrt-rtx" if machine is ADA else "Use the backend onnxruntime"
    with pytest.raises(BackendUnavailableError, match=rf"cannot run here: .*{reason}(.|\n)*{remedy}"):
        open_runner(bundle, "tensorrt_rtx", threads=None, machine=machine)


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt_lean"])
def test_a_bundle_without_an_engine_of_that_flavour_is_refused(bundle_path: Path, backend: str) -> None:
    bundle = add_engine(bundle_path, architectures=("sm89",))
    with pytest.raises(BackendUnavailableError, match=rf"{backend} with .*: the bundle has no tensorrt engine"):
        open_runner(bundle, backend, threads=None, machine=ADA)


def test_a_package_that_is_missing_comes_with_its_command(bundle_path: Path) -> None:
    bundle = add_engine(bundle_path, architectures=("sm89",))
    machine = dataclasses.replace(ADA, versions={})
    with pytest.raises(BackendUnavailableError, match=r"is not installed here.\nInstall it with: .*hdexport\[rtx\]"):
        open_runner(bundle, "tensorrt_rtx", threads=None, machine=machine)


@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize("backend", ["auto", "tensorrt_rtx"])
def test_an_engine_that_fits_is_taken(bundle_path: Path, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    bundle = add_engine(bundle_path, architectures=("sm86", "sm89"))
    with caplog.at_level(logging.INFO, logger="hdruntime"):
        _, runner, _ = open_runner(bundle, backend, threads=None, machine=ADA)
    assert runner.backend is Backend.TENSORRT_RTX
    assert ("chose tensorrt_rtx" in caplog.text) is (backend == "auto")


@pytest.mark.usefixtures("loads")
def test_options_reach_the_engine(bundle_path: Path) -> None:
    bundle = add_engine(bundle_path, architectures=("sm89",))
    gpu = hdruntime.GpuOptions(device=1, graphs="off", kernel_specialization="eager")
    _, runner, _ = open_runner(bundle, "auto", threads=None, gpu=gpu, machine=ADA)
    given = dataclasses.asdict(gpu)
    assert given.pop("memory_limit_bytes") is None
    assert runner.options == given  # type: ignore[attr-defined]


def test_an_engine_that_should_load_and_does_not_is_warned_of(
    bundle_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hdruntime.backends import tensorrt

    def fail(*_: Any, **__: Any) -> None:
        raise BackendError("the plan is damaged")

    monkeypatch.setattr(tensorrt, "TensorRtRunner", fail)
    bundle = add_engine(bundle_path, architectures=("sm89",))
    _, runner, _ = open_runner(bundle, "auto", threads=None, machine=ADA)
    assert runner.backend is Backend.ONNXRUNTIME
    assert "tensorrt_rtx should run here and does not: the plan is damaged" in caplog.text
    with pytest.raises(BackendError, match="the plan is damaged"):
        open_runner(bundle, "tensorrt_rtx", threads=None, machine=ADA)


# ONNX Runtime on the GPU.

WITH_CUDA = dataclasses.replace(ADA, versions={Backend.ONNXRUNTIME_CUDA: "1.31.1", **ADA.versions})


class _OnGpu:
    """Stands for ONNX Runtime's runner on a GPU."""

    backend = Backend.ONNXRUNTIME_CUDA

    def __init__(self, bundle: Bundle, *, gpu: hdruntime.GpuOptions, threads: int | None) -> None:
        self.gpu, self.threads = gpu, threads


@pytest.fixture
def cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime finds a GPU."""
    from hdruntime.backends import onnxruntime_cuda

    monkeypatch.setattr(onnxruntime_cuda, "OnnxRuntimeCudaRunner", _OnGpu)


@pytest.mark.usefixtures("cuda_starts")
@pytest.mark.parametrize("backend", ["auto", "onnxruntime_cuda"])
@pytest.mark.parametrize("architectures", [None, ("sm86",)], ids=["no engine", "an engine for another GPU"])
def test_onnx_runtime_takes_the_gpu_where_no_engine_does(
    bundle_path: Path, backend: str, architectures: tuple[str, ...] | None, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = open_bundle(bundle_path) if architectures is None else add_engine(bundle_path, architectures=architectures)
    gpu = hdruntime.GpuOptions(device=1, memory_limit_bytes=2**30)
    with caplog.at_level(logging.INFO, logger="hdruntime"):
        _, runner, _ = open_runner(bundle, backend, threads=3, gpu=gpu, machine=WITH_CUDA)
    assert isinstance(runner, _OnGpu)
    assert (runner.gpu, runner.threads) == (gpu, 3)
    assert ("chose onnxruntime_cuda" in caplog.text) is (backend == "auto")
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@pytest.mark.usefixtures("loads", "cuda_starts")
def test_an_engine_that_fits_comes_before_onnx_runtime(bundle_path: Path) -> None:
    bundle = add_engine(bundle_path, architectures=("sm89",))
    _, runner, _ = open_runner(bundle, "auto", threads=None, machine=WITH_CUDA)
    assert runner.backend is Backend.TENSORRT_RTX


@pytest.mark.usefixtures("loads", "cuda_starts")
def test_a_limit_of_memory_is_not_given_to_an_engine(bundle_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundle = add_engine(bundle_path, architectures=("sm89",))
    limit = hdruntime.GpuOptions(memory_limit_bytes=2**30)
    with pytest.raises(BackendUnavailableError, match=r"holds no memory_limit_bytes(.|\n)*backend onnxruntime_cuda"):
        open_runner(bundle, "tensorrt_rtx", threads=None, gpu=limit, machine=WITH_CUDA)
    _, runner, _ = open_runner(bundle, "auto", threads=None, gpu=limit, machine=WITH_CUDA)
    assert runner.backend is Backend.ONNXRUNTIME_CUDA
    assert "tensorrt_rtx holds no memory_limit_bytes" in caplog.text


@pytest.mark.parametrize(
    ("machine", "reason", "remedy"),
    [
        (NOWHERE, "CUDA sees no GPU here", "Use the backend onnxruntime"),
        (ADA, "no ONNX Runtime that was built with CUDA is installed here", re.escape(INSTALL_ONNXRUNTIME_CUDA)),
    ],
)
def test_onnx_runtime_on_the_gpu_runs_or_says_what_is_missing(
    bundle_path: Path, machine: ThisMachine, reason: str, remedy: str
) -> None:
    bundle = open_bundle(bundle_path)
    said = choice.why_unavailable(bundle, Backend.ONNXRUNTIME_CUDA, machine=machine)
    assert said is not None
    with pytest.raises(BackendUnavailableError, match=rf"_cuda with .* cannot run here: {reason}.\n.*{remedy}"):
        open_runner(bundle, "onnxruntime_cuda", threads=None, machine=machine)
    assert choice.why_unavailable(bundle, Backend.ONNXRUNTIME_CUDA, machine=WITH_CUDA) is None


def test_a_gpu_that_is_not_used_is_warned_of_with_the_command(
    bundle_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = add_engine(bundle_path, architectures=("sm86",))
    _, runner, _ = open_runner(bundle, "auto", threads=None, machine=ADA)
    assert runner.backend is Backend.ONNXRUNTIME
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.message == (
        "backend auto: chose onnxruntime, on the CPU, although there is a GPU (NVIDIA L4).\n"
        "tensorrt_rtx cannot run here: it is for GPUs of sm86, and this one (NVIDIA L4) is sm89.\n"
        "onnxruntime_cuda cannot run here: no ONNX Runtime that was built with CUDA is installed here.\n"
        "To use the GPU:\n"
        f"  tensorrt_rtx: hdexport rebuild {bundle_path} --target tensorrt-rtx\n"
        f"  onnxruntime_cuda: {INSTALL_ONNXRUNTIME_CUDA}"
    )


def test_without_a_gpu_the_cpu_is_taken_without_a_warning(bundle_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for bundle in (open_bundle(bundle_path), add_engine(bundle_path, architectures=("sm89",))):
        _, runner, reason = open_runner(bundle, "auto", threads=None, machine=NOWHERE)
        assert (runner.backend, reason) == (Backend.ONNXRUNTIME, why_no_gpu(()))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_onnx_runtime_that_should_find_the_gpu_and_does_not_is_warned_of(
    bundle_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not simulated: ONNX Runtime has no CUDA here."""
    if "onnxruntime_cuda" in this_machine().versions:
        pytest.skip("there is a GPU")
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"):
        _, runner, _ = open_runner(open_bundle(bundle_path), "auto", threads=None, machine=WITH_CUDA)
    assert runner.backend is Backend.ONNXRUNTIME
    assert "onnxruntime_cuda should run here and does not: ONNX Runtime" in caplog.text


def test_an_unknown_backend_lists_the_valid_ones(bundle_path: Path) -> None:
    valid = "auto, onnxruntime, onnxruntime_cuda, tensorrt, tensorrt_rtx, tensorrt_lean"
    with pytest.raises(InputError, match=f"'cuda'; valid are {valid}"):
        hdruntime.load(bundle_path, "cuda")


# Rebuilding. The command that builds is tested with the command line; here it is replaced by what it leaves behind.


@pytest.fixture
def rebuilds(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; each makes the bundle's engine fit an L4."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        add_engine(Path(command[4]), architectures=("sm89",))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(choice.subprocess, "run", run)
    return commands


@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize("backend", ["auto", "tensorrt_rtx"])
@pytest.mark.parametrize("had_engine", [True, False])
def test_an_engine_is_rebuilt_when_asked(
    bundle_path: Path, rebuilds: list[list[str]], backend: str, had_engine: bool
) -> None:
    bundle = add_engine(bundle_path, architectures=("sm86",)) if had_engine else open_bundle(bundle_path)
    opened, runner, _ = open_runner(bundle, backend, threads=None, rebuild=True, machine=ADA)
    assert runner.backend is Backend.TENSORRT_RTX
    assert opened.manifest.engines[0].architectures == ("sm89",)
    assert rebuilds == [
        [sys.executable, "-c", choice._REBUILD, "rebuild", str(bundle_path), "--target", "tensorrt-rtx"]
    ]
    open_runner(opened, backend, threads=None, rebuild=True, machine=ADA)
    assert len(rebuilds) == 1, "what runs is not rebuilt"


@pytest.mark.usefixtures("loads")
def test_two_that_ask_at_a_time_rebuild_once(bundle_path: Path, rebuilds: list[list[str]]) -> None:
    bundle = open_bundle(bundle_path)
    threads = [
        threading.Thread(
            target=open_runner, args=(bundle, "auto"), kwargs={"threads": None, "rebuild": True, "machine": ADA}
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(rebuilds) == 1


def test_without_a_gpu_nothing_is_rebuilt(bundle_path: Path, rebuilds: list[list[str]]) -> None:
    _, runner, _ = open_runner(open_bundle(bundle_path), "auto", threads=None, rebuild=True, machine=NOWHERE)
    assert runner.backend is Backend.ONNXRUNTIME
    assert rebuilds == []


@pytest.mark.parametrize(
    ("machine", "backend", "why"),
    [
        (ADA, "tensorrt", "tensorrt is not installed"),
        (ADA, "tensorrt_lean", "tensorrt is not installed"),
        (HOPPER, "auto", "tensorrt is not installed"),
        (HOPPER, "tensorrt_rtx", "tensorrt_rtx supports no GPU of sm90"),
    ],
)
def test_a_rebuild_that_is_not_possible_here_says_what_is(
    bundle_path: Path, machine: ThisMachine, backend: str, why: str
) -> None:
    message = rf"cannot be rebuilt here: {why}.\nTo use the GPU:\n  tensorrt: pip install 'hdexport.tensorrt.'"
    with pytest.raises(BackendUnavailableError, match=message):
        open_runner(open_bundle(bundle_path), backend, threads=None, rebuild=True, machine=machine)


def test_a_rebuild_that_does_not_help_is_not_repeated_without_a_word(
    bundle_path: Path, rebuilds: list[list[str]]
) -> None:
    blackwell = dataclasses.replace(ADA, gpu=dataclasses.replace(ADA.gpu, architecture="sm120"))
    with pytest.raises(BackendUnavailableError, match=r"was rebuilt .*: it is for GPUs of sm89, and this one .* sm120"):
        open_runner(open_bundle(bundle_path), "auto", threads=None, rebuild=True, machine=blackwell)


@pytest.mark.usefixtures("loads")
def test_the_real_command_rebuilds(bundle_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx_libs", reason="TensorRT-RTX is not installed: pip install 'hdexport[rtx]'")
    assert trt
    machine = dataclasses.replace(ADA, versions=this_machine().versions)
    opened, runner, _ = open_runner(open_bundle(bundle_path), "auto", threads=None, rebuild=True, machine=machine)
    assert runner.backend is Backend.TENSORRT_RTX
    assert "sm89" in opened.manifest.engines[0].architectures


def test_a_rebuild_that_fails_says_why(bundle_path: Path) -> None:
    """The real command, on a bundle whose graph is none."""
    (bundle_path / "model.onnx").write_bytes(b"no graph")
    seal(bundle_path, manifest_from_json((bundle_path / "manifest.json").read_bytes()))
    with pytest.raises(BackendError, match=r"(?s)Rebuilding the engine of .* for tensorrt_rtx failed:\n.*model\.onnx"):
        open_runner(open_bundle(bundle_path), "auto", threads=None, rebuild=True, machine=ADA)
