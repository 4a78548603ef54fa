"""`hdexport doctor`: every part is looked for on its own, and what is broken is told from what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hdexport import doctor
from hdplugins import OPERATORS
from hdruntime import process_limits
from hdruntime.backends.diagnostics import DiagnosticResult, DiagnosticStatus, ProbeResult
from hdruntime.gpu.driver import Gpu
from support.commands import run_here, run_installed

_DOCTOR_IN_A_PROCESS = """
import sys
blocked = {blocked!r}
sys.modules.update(dict.fromkeys(blocked))
from hdexport.cli import main
code = main(["doctor"])
heavy = [*blocked, "onnxruntime", "numpy"]
print("loaded:", [name for name in heavy if sys.modules.get(name) is not None])
sys.exit(code)
"""


def _results(path: Path) -> tuple[int, dict[str, dict[str, str | None]]]:
    """What the doctor finds where Python looks for packages in a folder first."""
    result = run_installed(
        "doctor", "--json", PYTHONPATH=os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])
    )
    answer = json.loads(result.stdout)
    assert answer["healthy"] == (result.returncode == 0)
    return result.returncode, {result["component"]: result for result in answer["results"]}


def a_gpu(architecture: str) -> Gpu:
    return Gpu(name="a GPU", architecture=architecture, memory_bytes=2**34)


def _package(directory: Path, name: str, code: str) -> Path:
    (directory / name).mkdir()
    (directory / name / "__init__.py").write_text(code)
    return directory


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str | None]]:
    """What the doctor finds here, where a lean runtime prints as it is imported."""
    path = _package(tmp_path_factory.mktemp("lean"), "tensorrt_lean", "print('hello'); __version__ = '11.2.0'")
    code, results = _results(path)
    assert code == 0
    return results


def test_every_part_has_a_line() -> None:
    result = run_here("doctor")
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    for component in ("Python", "hdexport", "NVIDIA driver", "GPU", "torch", "ONNX Runtime", "TensorRT-RTX"):
        assert any(line[9:].startswith(component) for line in result.stdout.splitlines()), component


def test_versions_are_those_that_are_installed(healthy: dict[str, dict[str, str | None]]) -> None:
    import onnxruntime
    import torch

    # What a wheel of PyPI says of itself lacks the build: +cu128.
    assert str(healthy["torch"]["detail"]).partition("+")[0] == torch.__version__.partition("+")[0]
    assert str(healthy["ONNX Runtime"]["detail"]).startswith(f"{onnxruntime.__version__}: ")
    assert "CPUExecutionProvider" in str(healthy["ONNX Runtime"]["detail"])
    assert healthy["TensorRT lean runtime"] == {
        "component": "TensorRT lean runtime",
        "status": "ok",
        "detail": "11.2.0",
        "fix": None,
    }


@pytest.mark.skipif(len(process_limits.usable_cpus()) < 2, reason="a quota of one CPU is none on one CPU")
def test_the_limits_of_a_container_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("300000000\n")
    (tmp_path / "memory.current").write_text("100000000\n")
    monkeypatch.setattr(doctor, "backends", list)  # each starts a process
    before = json.loads(run_here("doctor", "--json").stdout)["results"]
    monkeypatch.setattr(process_limits, "_groups", lambda controller, root: [(2, tmp_path)])
    after = json.loads(run_here("doctor", "--json").stdout)["results"]
    of_before, of_after = ({result["component"]: result["detail"] for result in found} for found in (before, after))
    assert "quota" not in of_before["CPU threads"]
    assert of_after["CPU threads"] == "1 thread: the container's quota is 0.5 CPUs"
    assert of_after["memory"] == "0.2 GB free; the container's limit is 0.3 GB"


@pytest.mark.parametrize("why", [None, "was not built"])
def test_it_says_whether_the_launcher_of_kernels_was_built(why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "backends", list)
    monkeypatch.setattr(doctor, "launcher_unavailable_reason", lambda: why)
    found = {result["component"]: result for result in json.loads(run_here("doctor", "--json").stdout)["results"]}
    launcher = found["kernel launcher"]
    assert launcher["status"] == ("missing" if why else "ok")
    if why is not None:
        assert launcher["detail"].startswith("the launcher was not built; ONNX Runtime")
        assert launcher["fix"].startswith("pip install --force-reinstall --no-deps hdexport")


def test_a_base_installation_is_healthy_and_nothing_heavy_is_loaded() -> None:
    blocked = ["torch", "transformers", "onnx", "onnx_ir", "onnxscript", "polygraphy", "tensorrt_rtx"]
    result = subprocess.run(
        [sys.executable, "-c", _DOCTOR_IN_A_PROCESS.format(blocked=blocked)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "loaded: []"


def test_packages_that_do_not_load_or_crash_are_broken_and_the_doctor_lives(tmp_path: Path) -> None:
    _package(tmp_path, "tensorrt_lean", "raise ImportError('libnvinfer_lean.so.11: no such file')")
    _package(tmp_path, "tensorrt", "import os; os.abort()")
    code, results = _results(tmp_path)
    assert code == 1
    assert results["TensorRT lean runtime"]["status"] == "broken"
    assert "libnvinfer_lean.so.11: no such file" in str(results["TensorRT lean runtime"]["detail"])
    assert results["TensorRT"]["status"] == "broken"
    assert results["TensorRT"]["fix"] == "pip install 'hdexport[tensorrt]'"
    assert results["ONNX Runtime"]["status"] == "ok"


def test_two_onnx_runtimes_over_each_other_are_broken(tmp_path: Path) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime-gpu is installed")
    distribution = tmp_path / "onnxruntime_gpu-1.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.0\n")
    code, results = _results(tmp_path)
    assert code == 1
    assert results["ONNX Runtime"]["status"] == "broken"
    assert "pip uninstall -y onnxruntime" in str(results["ONNX Runtime"]["fix"])


def test_a_gpu_that_onnx_runtime_does_not_use_comes_with_the_command() -> None:
    """What the doctor asks of ONNX Runtime is real; the GPU is not."""
    from hdruntime.backends.onnxruntime.backend import OnnxRuntimeBackend
    from hdruntime.optional import INSTALL_ONNXRUNTIME_CUDA

    def found_with(*providers: str, **details: bool) -> DiagnosticResult:
        return OnnxRuntimeBackend().diagnose(ProbeResult("1.31.1", {"providers": providers} | details), a_gpu("sm89"))

    found = found_with("CPUExecutionProvider")
    assert (found.status, found.fix) == (DiagnosticStatus.MISSING, INSTALL_ONNXRUNTIME_CUDA)
    assert "the backend onnxruntime_cuda cannot use the GPU" in found.detail
    providers = ("CUDAExecutionProvider", "CPUExecutionProvider")
    broken = found_with(*providers, opens_cuda=False)
    assert (broken.status, broken.fix) == (DiagnosticStatus.BROKEN, INSTALL_ONNXRUNTIME_CUDA)
    assert "no session opens on the GPU: libraries of CUDA or cuDNN are missing" in broken.detail
    assert found_with(*providers, opens_cuda=True).status is DiagnosticStatus.OK


def test_the_graph_that_the_doctor_runs_doubles_a_number() -> None:
    import onnxruntime

    from hdruntime.backends.onnxruntime.backend import DOUBLING

    session = onnxruntime.InferenceSession(bytes.fromhex(DOUBLING), providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.float32([21])})[0].tolist() == [42]


def test_tensorrt_rtx_is_not_recommended_for_a_gpu_that_it_does_not_support() -> None:
    from hdruntime.backends.tensorrt.backend import TensorRtRtxBackend

    for architecture, installed, detail, fix in (
        ("sm90", False, "not installed; it supports no GPU of sm90", None),
        ("sm90", True, "1.7.1; it supports no GPU of sm90", None),
        ("sm89", False, "not installed", "pip install 'hdexport[rtx]'"),
    ):
        found = TensorRtRtxBackend().diagnose(ProbeResult("1.7.1") if installed else None, a_gpu(architecture))
        assert (found.detail, found.fix) == (detail, fix)


def test_a_gpu_that_only_the_driver_sees_comes_with_what_shows_it_to_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from hdexport.doctor import _gpu

    monkeypatch.setattr("hdexport.doctor.listed_gpus", lambda: ("NVIDIA H200",))
    found = _gpu(())
    assert found.detail.startswith("CUDA does not find the GPU that the NVIDIA driver lists, NVIDIA H200")
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in str(found.fix)


def test_openvino_comes_with_its_devices_and_their_precisions(
    healthy: dict[str, dict[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hdruntime.backends.openvino import backend

    openvino = pytest.importorskip("openvino")
    found = str(healthy["OpenVINO"]["detail"])
    assert healthy["OpenVINO"]["status"] == "ok"
    assert found.startswith(f"{openvino.__version__}: CPU (")
    assert "float32" in found
    assert "on the CPU, auto takes o" in found
    entry = backend.OpenVinoBackend()
    assert entry.diagnose(None, None).fix == "pip install 'hdexport[openvino]'"
    old: dict[str, object] = {"devices": [("CPU", "Old CPU", ("FP32", "INT8"))]}
    detail = entry.diagnose(ProbeResult("1.0", old), None).detail
    assert detail == "1.0: CPU (Old CPU: float32, int8); on the CPU, auto takes onnxruntime"
    new = ProbeResult("1.0", old | {"is_preferred": True})
    monkeypatch.setattr(backend, "has_int8", lambda: True)
    assert entry.diagnose(new, None).detail.endswith(
        "for bundles with a graph for OpenVINO and sliding-window attention, or, in bfloat16 and int8, "
        "dense, block-sparse or chunk attention"
    )
    faster = backend.FASTER_WITH
    assert [name for name, precisions in faster.items() if "float32" in precisions] == ["SlidingWindowAttention"]
    assert set(faster) == {f"{kind}Attention" for kind in ("SlidingWindow", "Dense", "BlockSparse", "Chunk")}
    assert set(faster) <= set(OPERATORS)
    monkeypatch.setattr(backend, "has_int8", lambda: False)
    assert entry.diagnose(new, None).detail.endswith("or, in bfloat16, dense, block-sparse or chunk attention")
