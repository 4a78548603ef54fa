"""Engines and the graph for CUDA are compared where they run: a right engine passes, and a wrong one is found."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import numpy_helper

from fakes.machine import Machine, MachineMaker
from hdexport.checkpoint import find_checkpoint
from hdexport.support.bundle_writer import seal
from hdexport.verify import Grid, Verification, verify_bundle
from hdexport.verify.pytorch_reference import reference_of
from hdruntime.backends.entry import ThisMachine
from hdruntime.bundle.manifest import Backend, ProfileShape
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.verification import Case, Skip, SkipCause, Status
from hdruntime.errors import BackendUnavailableError
from hdruntime.gpu.driver import Gpu
from tests.runtime.backends.tensorrt.conftest import new_machine  # noqa: F401 fixture

MAX_LEN = 300
PROFILES = (
    ProfileShape(batch=(1, 1, 3), tokens=(1, 64, 64)),
    ProfileShape(batch=(1, 1, 3), tokens=(1, MAX_LEN, MAX_LEN)),
)
ENGINE = "engines/tensorrt.engine"


@pytest.fixture
def with_engine(tiny_bundles, new_machine: MachineMaker, monkeypatch) -> Callable[..., Machine]:  # noqa: F811
    """A machine whose bundle is a tiny BERT's, with a simulated engine of its graph, which a change may come before."""
    right = tiny_bundles("bert")
    gpu = Gpu(name="simulated", architecture="sm86", memory_bytes=2**33)

    def make(change: Callable[[onnx.ModelProto], None] | None = None, **options: Any) -> Machine:
        def copied(path: Path) -> Path:
            shutil.copytree(right.path, path)
            if change is not None:
                model = onnx.load(path / "model.onnx")
                change(model)
                onnx.save(model, path / "model.onnx")
                seal(path, right.manifest)
            return path

        machine = new_machine(made_by=copied, **{"profiles": PROFILES, "max_len": MAX_LEN} | options)
        versions = {Backend.TENSORRT: machine.trt.__version__}
        here = ThisMachine(gpu=gpu, driver="580.0", versions=versions)
        monkeypatch.setattr("hdruntime.backends.choice.this_machine", lambda *of: here)
        return machine

    return make


@pytest.fixture
def verified(tiny_bundles) -> Callable[..., Verification]:
    """A verification by the quick grid."""
    right = tiny_bundles("bert")
    reference = reference_of(open_bundle(right.path), find_checkpoint(right.checkpoint))

    def verify(machine: Machine, backend: Backend | None = Backend.TENSORRT) -> Verification:
        return verify_bundle(machine.bundle, reference, grid=Grid.QUICK, backend=backend)

    return verify


def another_weight(model: onnx.ModelProto) -> None:
    """As a kernel of another version of an operator would answer."""
    weight = next(item for item in model.graph.initializer if "value" in item.name)
    weight.CopyFrom(numpy_helper.from_array(1.01 * numpy_helper.to_array(weight), weight.name))


def test_a_right_engine_passes_in_every_case(with_engine, verified) -> None:
    found = verified(with_engine())
    assert found.passed, found.failed
    assert {check.graph for check in found.checks} == {ENGINE}
    assert {1, 2, 65, 66, MAX_LEN} <= {check.case.tokens for check in found.checks}
    assert found.skipped == ()


def test_a_wrong_plugin_is_found(with_engine, verified) -> None:
    found = verified(with_engine(another_weight))
    assert not any(check.passed for check in found.checks)
    record = found.record().graphs[ENGINE]
    assert (record.status, record.passed, record.files) == (Status.FAIL, 0, (ENGINE,))


def test_lengths_beyond_the_profiles_are_left_out_and_said(with_engine, verified) -> None:
    found = verified(with_engine(profiles=PROFILES[:1]))
    assert found.passed
    assert {check.case.tokens for check in found.checks} == {1, 2}
    case = Case(tokens=65, lengths=(65,))
    assert Skip(cause=SkipCause.ENGINE_PROFILE, graph=ENGINE, case=case, limit=64) in found.skipped


def test_without_a_choice_all_that_runs_here_is_compared(with_engine, verified) -> None:
    found = verified(with_engine(), None)
    assert found.passed
    assert {check.graph for check in found.checks} == {ENGINE, "model.onnx", "onnxruntime_cpu.onnx"}
    (skip,) = found.skipped
    assert (skip.graph, skip.backend) == ("onnxruntime_cuda.onnx", "onnxruntime_cuda")


def test_a_backend_that_cannot_run_is_refused(with_engine, verified) -> None:
    with pytest.raises(BackendUnavailableError, match="No ONNX Runtime that was built with CUDA is installed"):
        verified(with_engine(), Backend.ONNXRUNTIME_CUDA)
    with pytest.raises(BackendUnavailableError, match="has nothing for tensorrt_rtx"):
        verified(with_engine(), Backend.TENSORRT_RTX)
