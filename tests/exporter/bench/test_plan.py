"""What a benchmark decides to run, and what it says cannot."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from hdexport.bench.baselines import BASELINES
from hdexport.bench.run.plan import BenchOptions, Plan, default_lengths, parse_lengths, plan
from hdexport.support.bundle_writer import seal
from hdruntime.backends.entry import ThisMachine
from hdruntime.backends.openvino import OPENVINO_LOWERING
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BundleNotFoundError, InputError
from hdruntime.gpu.driver import Gpu
from support.tiny_bundle import engine_file

ENGINE = engine_file("rtx", version="1.7.1.116")
TORCH, PLAIN = BASELINES["torch"], BASELINES["onnx-plain"]
WITHOUT_GPU = ThisMachine(gpu=None, driver=None, versions={})
WITH_GPU = ThisMachine(
    gpu=Gpu(name="NVIDIA L4", architecture="sm89", memory_bytes=24 * 10**9),
    driver="580.1",
    versions={Backend.TENSORRT_RTX: "1.7.1.116"},
)


@pytest.fixture
def bundle(tiny_bundles: Any, tmp_path: Path) -> Path:
    """A bundle of its own, to be changed; its checkpoint is beside it, where it is looked for."""
    made = tiny_bundles("bert")
    (tmp_path / made.checkpoint.name).symlink_to(made.checkpoint)
    return copied(made.path, tmp_path / "bundle")


def copied(bundle: Path, to: Path, **changes: Any) -> Path:
    """A bundle's copy, whose manifest says something else."""
    shutil.copytree(bundle, to)
    manifest = dataclasses.replace(open_bundle(to, check_files=False).manifest, **changes)
    # The one says what the other does.
    manifest = dataclasses.replace(manifest, positions=dataclasses.replace(manifest.positions, rows=manifest.max_len))
    for engine in manifest.engines:
        (to / engine.file).parent.mkdir(exist_ok=True)
        (to / engine.file).write_bytes(b"no engine")
        (to / engine.metadata).write_text("{}")
    seal(to, manifest)
    return to


def planned(*bundles: Path, machine: ThisMachine = WITHOUT_GPU, **options: Any) -> Plan:
    return plan(BenchOptions(bundles=bundles, **options), machine=machine)


def names(found: Plan) -> list[str]:
    return [planned.series.name for planned in found.series if planned.is_available]


def test_bundles_of_one_model_share_their_baselines(bundle: Path, tmp_path: Path) -> None:
    half = copied(bundle, tmp_path / "half", dtype="float16", max_len=1000)
    found = planned(bundle, half, baselines=(TORCH, PLAIN))
    assert names(found) == ["bundle (onnxruntime)", "half (onnxruntime)", "torch", "onnx-plain"]
    (model,) = {planned.model for planned in found.series}
    assert model.bundle == half  # the one that takes the longest texts
    assert found.lengths == (512, 1000)


@pytest.mark.parametrize("changes", [{"alpha": 0.3}, {"form": "computed", "rope_factor": 4.0}])
def test_models_that_differ_have_baselines_of_their_own(bundle: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    manifest = open_bundle(bundle, check_files=False).manifest
    other = copied(bundle, tmp_path / "other", positions=dataclasses.replace(manifest.positions, **changes))
    assert names(planned(bundle, other, baselines=(TORCH,))) == [
        "bundle (onnxruntime)", "other (onnxruntime)", "torch: bundle", "torch: other",
    ]  # fmt: skip


def test_an_engine_runs_where_its_gpu_is_and_baselines_go_there_too(bundle: Path, tmp_path: Path) -> None:
    with_engine = copied(bundle, tmp_path / "engine", engines=(ENGINE,))
    found = planned(with_engine, baselines=(TORCH,), machine=WITH_GPU)
    assert [(each.series.runner, each.device) for each in found.series] == [
        ("onnxruntime", "cpu"), ("onnxruntime_cuda", "cuda"), ("tensorrt_rtx", "cuda"), ("torch", "cuda"),
    ]  # fmt: skip
    assert names(found) == ["engine (onnxruntime)", "engine (tensorrt_rtx)", "torch"]
    assert "pip install 'hdexport[gpu]'" in str(found.series[1].series.unavailable)
    with_cuda = dataclasses.replace(WITH_GPU, versions={Backend.ONNXRUNTIME_CUDA: "1.31.1"})
    assert "engine (onnxruntime_cuda)" in names(planned(with_engine, baselines=(), machine=with_cuda))
    on_cpu = planned(with_engine, baselines=(TORCH,), machine=WITH_GPU, device="cpu", backends=("onnxruntime",))
    assert [(each.series.runner, each.device) for each in on_cpu.series] == [("onnxruntime", "cpu"), ("torch", "cpu")]


def test_a_bundle_is_measured_in_each_precision_that_it_was_built_for_and_once_on_a_gpu(
    bundle: Path, tmp_path: Path
) -> None:
    manifest = open_bundle(bundle).manifest
    graphs = [*manifest.graphs, dataclasses.replace(manifest.graphs[0], lowering=OPENVINO_LOWERING)]
    int8 = [dataclasses.replace(graph, dtype="int8") for graph in graphs]
    both = copied(bundle, tmp_path / "both", graphs=(*graphs, *int8), engines=(ENGINE,))
    found = planned(both, baselines=(), machine=WITH_GPU)
    assert [(each.series.runner, each.precision.value) for each in found.series] == [
        ("onnxruntime", "auto"), ("onnxruntime", "int8"), ("openvino", "auto"), ("openvino", "int8"),
        ("onnxruntime_cuda", "auto"), ("tensorrt_rtx", "auto"),
    ]  # fmt: skip
    assert [each.series.name for each in found.series][:4] == [
        "both (onnxruntime)", "both (onnxruntime, int8)", "both (openvino)", "both (openvino, int8)",
    ]  # fmt: skip
    asked = planned(
        both, baselines=(), machine=WITH_GPU, precisions=("bfloat16",), backends=("openvino", "tensorrt_rtx")
    )
    assert [each.series.name for each in asked.series] == ["both (tensorrt_rtx)", "both (openvino, bfloat16)"]
    assert [each.device for each in asked.series] == ["cuda", "cpu"]


def test_a_precision_that_a_backend_lacks_is_listed_with_the_reason(bundle: Path) -> None:
    found = planned(bundle, baselines=(TORCH,), precisions=("float32", "bfloat16", "int8"))
    reasons = {each.precision.value: each.series.unavailable for each in found.series[:3]}
    assert reasons["float32"] is None
    assert "ONNX Runtime computes in bfloat16 only on Linux on aarch64" in str(reasons["bfloat16"])
    assert "no graph in int8" in str(reasons["int8"])
    with pytest.raises(InputError, match=r"None of these series .*:\nbundle \(onnxruntime, bfloat16\): ONNX Runtime"):
        planned(bundle, baselines=(), precisions=("bfloat16",))


def test_without_the_checkpoint_bundles_are_measured_and_nothing_is_compared(bundle: Path, tmp_path: Path) -> None:
    lone = copied(bundle, tmp_path / "lone", made_by={"source": "/gone"})
    found = planned(lone, baselines=(TORCH,))
    assert names(found) == ["lone (onnxruntime)"]
    assert (
        found.series[1].series.unavailable == f"{lone} was built from /gone, which was not found. Name the checkpoint."
    )
    assert found.notes == (
        f"{lone} was built from /gone, which was not found. Nothing was compared with PyTorch. Name the checkpoint.",
    )
    assert names(planned(lone, baselines=(TORCH,), model="somewhere/else")) == ["lone (onnxruntime)", "torch"]


def test_what_does_not_fit_is_refused(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"contains 301; the bundles accept 1 to 300 tokens.\n.*max_len=301"):
        planned(bundle, lengths=(64, 301))
    with pytest.raises(InputError, match=r"precisions: 'fp8' is not a precision; valid: auto, float32"):
        planned(bundle, precisions=("fp8",))
    with pytest.raises(InputError, match=r"'trt' is not a backend; valid: tensorrt, tensorrt_rtx, tensorrt_lean"):
        planned(bundle, backends=("trt",))
    with pytest.raises(
        InputError, match=r"None of these series can run here:\nbundle \(tensorrt\): The bundle has no tensorrt engine"
    ):
        planned(bundle, backends=("tensorrt",), baselines=())
    with pytest.raises(BundleNotFoundError):
        planned(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("4096,128, 512,128", (128, 512, 4096)),
        ("512:3000:x2", (512, 1024, 2048, 3000)),
        ("500:1100:+500", (500, 1000, 1100)),
        ("64,512:1024:x2", (64, 512, 1024)),
        ("5:7:+1", (5, 6, 7)),
    ],
)
def test_numbers_and_ranges_give_rising_lengths_with_both_ends(text: str, lengths: tuple[int, ...]) -> None:
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize("text", ["", "0", "1.5", "512:256:x2", "512:8192:x1", "1:9:+0", "1:2:3"])
def test_an_invalid_length_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match=r"is not a length in tokens.\n.*such as 128,512,4096"):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["9" * 5000, "1:9999999999:+1", f"1:{2**70}:x2"])
def test_lengths_that_would_fill_the_memory_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"\n.*such as 128,512,4096"):
        parse_lengths(text)


@pytest.mark.parametrize(
    ("max_len", "lengths"),
    [(1, (1,)), (100, (12, 24, 48, 96, 100)), (513, (512, 513)), (5000, (512, 1024, 2048, 4096, 5000))],
)
def test_the_default_ends_at_the_longest_that_is_accepted(max_len: int, lengths: tuple[int, ...]) -> None:
    assert default_lengths(max_len) == lengths
