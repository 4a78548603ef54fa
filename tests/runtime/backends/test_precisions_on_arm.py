"""What backends compute in on ARM, told by a platform that claims to be ARM; tests/runtime/test_aarch64.py runs it."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

import hdruntime
from hdexport.graph.targets.onnxruntime.target import OnnxTarget
from hdruntime.backends.onnxruntime import CPU_LOWERING, FAST_MATH, HAS_FAST_MATH, bfloat16
from hdruntime.backends.onnxruntime.backend import OnnxRuntimeBackend
from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner
from hdruntime.backends.openvino.devices import OpenVinoDevice, chosen_precision
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import GraphFile
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BackendUnavailableError

PRECISIONS_ON_ARM = (Precision.FLOAT32, Precision.BFLOAT16, Precision.INT8)


@pytest.fixture
def on_arm(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Claim to be Linux on ARM, on a processor with bfloat16 instructions or without."""

    def claim(has_instructions: bool) -> None:
        monkeypatch.setattr(bfloat16, "HAS_FAST_MATH", True)
        monkeypatch.setattr(OnnxRuntimeBackend, "precisions", PRECISIONS_ON_ARM)
        monkeypatch.setattr(bfloat16, "multiplies_bfloat16", lambda: has_instructions)

    return claim


def test_a_matmul_tells_whether_the_processor_multiplies_bfloat16() -> None:
    cpuinfo = Path("/proc/cpuinfo").read_text() if HAS_FAST_MATH else ""
    assert bfloat16.multiplies_bfloat16() is (" bf16" in cpuinfo)


def test_a_processor_with_the_instructions_computes_in_bfloat16_when_asked(
    bundle_path: Path, on_arm: Callable[[bool], None]
) -> None:
    on_arm(True)
    bundle = open_bundle(bundle_path)
    computing = OnnxRuntimeRunner(bundle, threads=1, precision=Precision.BFLOAT16)
    by_default = OnnxRuntimeRunner(bundle, threads=1)
    assert (computing.precision, by_default.precision) == (Precision.BFLOAT16, Precision.FLOAT32)
    assert computing._session.get_session_options().get_session_config_entry(FAST_MATH) == "1"
    with pytest.raises(RuntimeError, match=FAST_MATH):
        by_default._session.get_session_options().get_session_config_entry(FAST_MATH)
    with hdruntime.load(bundle_path, threads=1, precision="bfloat16", device="cpu") as session:
        assert session.backend == "onnxruntime"


def test_bfloat16_is_refused_where_it_would_be_float32_or_wrong(
    bundle_path: Path, on_arm: Callable[[bool], None]
) -> None:
    if not HAS_FAST_MATH:
        with pytest.raises(BackendUnavailableError, match=r"only on Linux on aarch64, and this is .*\n.*openvino"):
            hdruntime.load(bundle_path, "onnxruntime", precision="bfloat16")
    on_arm(False)
    with pytest.raises(BackendUnavailableError, match=r"on this processor, which lacks the instructions.*\n.*auto"):
        hdruntime.load(bundle_path, "onnxruntime", precision="bfloat16")
    on_arm(True)
    manifest = dataclasses.replace(open_bundle(bundle_path).manifest, operators={"hdexport::LSHAttention": 2})
    with pytest.raises(BackendUnavailableError, match="sorts tokens by hashes"):
        bfloat16.check_bfloat16(manifest)


def test_the_graph_for_cpus_is_verified_in_bfloat16_there(bundle_path: Path, on_arm: Callable[[bool], None]) -> None:
    target, manifest = OnnxTarget(), open_bundle(bundle_path).manifest
    graph = GraphFile(file="graph.onnx", lowering=CPU_LOWERING, dtype="float32")
    portable, int8 = dataclasses.replace(graph, lowering="portable"), dataclasses.replace(graph, dtype="int8")
    on_arm(True)
    assert target.precisions(graph) == (Precision.FLOAT32, Precision.BFLOAT16)
    assert (target.precisions(portable), target.precisions(int8)) == ((Precision.FLOAT32,), (Precision.INT8,))
    assert target.verification_skip(graph, Precision.BFLOAT16, manifest) is None
    on_arm(False)
    skip = target.verification_skip(graph, Precision.BFLOAT16, manifest)
    assert skip is not None
    assert skip.detail == "this CPU does not compute in bfloat16"


def test_int8_in_openvino_is_refused_on_arm(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = open_bundle(bundle_path).manifest
    device = OpenVinoDevice(name="CPU", model="a processor", capabilities=("FP32", "INT8"))
    for machine in ("aarch64", "arm64"):
        monkeypatch.setattr(platform, "machine", lambda name=machine: name)
        with pytest.raises(BackendUnavailableError, match=r"int8 graphs wrongly on ARM.*\n.*onnxruntime"):
            chosen_precision(device, Precision.INT8, manifest)
        assert chosen_precision(device, Precision.AUTO, manifest) is Precision.FLOAT32
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert chosen_precision(device, Precision.INT8, manifest) is Precision.INT8
