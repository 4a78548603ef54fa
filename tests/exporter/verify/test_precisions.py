"""OpenVINO's graphs are verified in every precision, each by tolerances of its own, and what is not checked is said."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from hdexport.checkpoint import find_checkpoint
from hdexport.verify import Grid, Verification, verify_bundle
from hdexport.verify.checks import compare_case
from hdexport.verify.graph_sets import GraphSet, check_precision
from hdexport.verify.pytorch_reference import Reference, reference_of
from hdruntime.backends.onnxruntime import CPU_LOWERING
from hdruntime.backends.openvino import OPENVINO_LOWERING, OPENVINO_UNPADDED_LOWERING, devices, runner
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend, GraphFile, Manifest, TensorSpec
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.bundle.verification import Case, GraphVerification, Skip, SkipCause
from hdruntime.errors import BackendUnavailableError, InputError
from support.grids import nightly_unless
from support.tampered_bundles import multiplied_by, tampered

pytest.importorskip("openvino")

BOTH = "openvino.onnx and openvino_unpadded.onnx"
IN_BFLOAT16 = f"{BOTH} in bfloat16"

has_bfloat16 = devices.chosen_device(devices.new_core(), None).has_bfloat16
needs_bfloat16 = pytest.mark.skipif(not has_bfloat16, reason="this CPU does not compute in bfloat16")


def reference(bundle) -> Reference:
    return reference_of(open_bundle(bundle.path), find_checkpoint(bundle.checkpoint))


def verified(bundle, path: Path | None = None, **options) -> Verification:
    opened = open_bundle(path or bundle.path)
    return verify_bundle(opened, reference(bundle), grid=Grid.QUICK, **options)


def of_graph(found: Verification, name: str) -> GraphVerification:
    return found.record().graphs[name]


def test_both_graphs_are_verified_as_one_session_runs_them(openvino_bundles) -> None:
    found = verified(openvino_bundles("bert"))
    assert found.passed
    assert [*dict.fromkeys(check.graph for check in found.checks)][:3] == ["model.onnx", "onnxruntime_cpu.onnx", BOTH]
    record = of_graph(found, BOTH)
    assert (record.precision, str(record.tolerance)) == ("float32", "abs 0.0001 or 2 ulp")
    cases = [check.case for check in found.checks if check.graph == BOTH]
    assert len(cases) == len(set(cases))
    assert set(cases) == {check.case for check in found.checks if check.graph == "model.onnx"}
    assert {case.padding for case in cases} == {"none", "right", "left"}


negate_some_features = multiplied_by(np.repeat(np.float32([-1, 1]), 16))
"""Half of those of the last hidden state."""


@pytest.mark.parametrize(("file", "padding"), [("openvino.onnx", "left"), ("openvino_unpadded.onnx", "none")])
def test_a_wrong_graph_fails_where_the_session_runs_it(openvino_bundles, tmp_path, file: str, padding: str) -> None:
    bundle = openvino_bundles("bert")
    found = verified(bundle, tampered(bundle, tmp_path / "bundle", negate_some_features, file))
    failed = [check for check in found.checks if not check.passed]
    assert {check.graph for check in failed} == {BOTH}
    assert padding in {check.case.padding for check in failed}
    whole = {check.case.padding for check in failed if check.case.batch == 1 and check.case.tokens > 1}
    assert ("none" in whole) == (padding == "none")


@needs_bfloat16
def test_a_bundle_of_half_precision_is_verified_in_bfloat16_as_well(openvino_bundles, tmp_path) -> None:
    bundle = openvino_bundles("bert", precision="bfloat16")
    found = verified(bundle)
    assert found.passed
    record = of_graph(found, IN_BFLOAT16)
    assert (record.precision, str(record.tolerance)) == (
        "bfloat16",
        "cosine 0.999, mean length 2%, token length 8.9%",
    )
    exact = of_graph(found, BOTH)
    assert exact.precision == "float32"
    assert exact.max_abs_error is not None
    assert record.max_abs_error is not None
    assert exact.max_abs_error < record.max_abs_error
    wrong = verified(bundle, tampered(bundle, tmp_path / "bundle", negate_some_features, "openvino_unpadded.onnx"))
    assert not all(check.passed for check in wrong.checks if check.graph == IN_BFLOAT16)


@needs_bfloat16
@pytest.mark.parametrize(
    ("task", "tolerance"),
    [
        ("question-answering", "scores 4.5% of spread"),
        pytest.param("sentence-similarity", "cosine 0.999", marks=pytest.mark.nightly),
    ],
)
def test_answers_of_every_kind_have_a_tolerance(openvino_bundles, task: str, tolerance: str) -> None:
    found = verified(openvino_bundles("bert", task), precisions={Precision.BFLOAT16})
    assert found.passed
    assert {check.graph for check in found.checks} == {IN_BFLOAT16}
    assert all(str(check.tolerance).startswith(tolerance) for check in found.checks)
    assert Skip(cause=SkipCause.PRECISION, graph="model.onnx") in found.skipped


@pytest.fixture
def manifest(openvino_bundles) -> Manifest:
    """Of a bundle with graphs for OpenVINO, and such as `--int8` adds."""
    found = openvino_bundles("bert").manifest
    added = [
        GraphFile(file=f"{lowering}_int8.onnx", lowering=lowering, dtype="int8")
        for lowering in (CPU_LOWERING, OPENVINO_LOWERING, OPENVINO_UNPADDED_LOWERING)
    ]
    return dataclasses.replace(found, graphs=(*found.graphs, *added))


def test_a_precision_that_the_bundle_or_the_cpu_lacks_is_refused(tiny_bundles, manifest, monkeypatch) -> None:
    plain = open_bundle(tiny_bundles("bert").path)
    with pytest.raises(InputError, match=r"no graph that computes in int8 on a CPU\.\nBuild it again with int8, or"):
        check_precision(plain, Precision.INT8)
    with pytest.raises(InputError, match=r"in bfloat16 on a CPU\.\nBuild it again with targets='openvino', or leave"):
        check_precision(plain, Precision.BFLOAT16)
    bundle = Bundle(plain.path, manifest)
    for precision in (Precision.FLOAT32, Precision.INT8):
        check_precision(bundle, precision)
    monkeypatch.setattr(devices.OpenVinoDevice, "has_bfloat16", False)
    with pytest.raises(BackendUnavailableError, match=r"does not compute in bfloat16"):
        check_precision(bundle, Precision.BFLOAT16)


def test_an_int8_answer_is_held_to_int8s_tolerance(manifest) -> None:
    case = Case(tokens=3, lengths=(3,), padding="none")
    graphs = GraphSet(backend=Backend.ONNXRUNTIME, graphs=manifest.graphs[-1:], precision=Precision.INT8)
    right = np.random.default_rng(0).normal(size=(1, 3, 32)).astype(np.float32)
    manifest = dataclasses.replace(
        manifest, outputs=(TensorSpec(name="last_hidden_state", dtype="float32", shape=("batch", "tokens", 32)),)
    )

    def check(got: np.ndarray):
        return compare_case(graphs, case, manifest, [{"last_hidden_state": right[0]}], {"last_hidden_state": got}, None)

    noise = np.random.default_rng(1).normal(size=right.shape).astype(np.float32)
    assert check(right + 0.05 * noise).passed
    assert not check(right + 0.2 * noise).passed
    assert not check(right[:, [1, 0, 2]]).passed
    assert not check(right * 1.21).passed
    assert check(right).record()["precision"] == "int8"


@pytest.mark.parametrize("change", ["values", nightly_unless(False, "hashes")])
def test_a_graph_that_hashes_is_followed_in_openvino_and_a_wrong_one_found(
    openvino_bundles, tmp_path: Path, change: str
) -> None:
    bundle = openvino_bundles("bert", attention="lsh:chunk=16,rounds=2")

    def changed(model: ir.Model) -> None:
        nodes = list(model.graph)
        if change == "hashes":
            for node in nodes:
                node.op_type = "ArgMin" if node.op_type == "ArgMax" else node.op_type
        else:
            # Of the last layer, after which nothing is hashed.
            projection = model.graph.initializers[max(name for name in model.graph.initializers if "value" in name)]
            assert projection.const_value is not None
            projection.const_value = ir.tensor(-projection.const_value.numpy(), name=projection.name)

    found = verified(bundle, tampered(bundle, tmp_path / "wrong", changed, "openvino.onnx"))
    assert "openvino.onnx" in {check.graph for check in found.checks}
    assert SkipCause.HIDDEN_DECISIONS not in {skip.cause for skip in found.skipped}
    failed = [check for check in found.checks if not check.passed]
    assert {check.graph for check in failed} == {"openvino.onnx"}
    assert any(check.wrong_decisions for check in failed) == (change == "hashes")


def test_one_graph_of_a_large_model_is_compiled_at_a_time(openvino_bundles, tmp_path, monkeypatch) -> None:
    bundle = openvino_bundles("bert")
    expected = verified(bundle)
    monkeypatch.setattr("hdexport.graph.targets.openvino.target._LARGE_BYTES", 1)
    compiled, most = [], []
    compile_, close = runner._Model.compile, runner._Model.close

    def counted(model) -> None:
        compiled.append(model)
        most.append(len(compiled))
        compile_(model)

    def closed(model) -> None:
        close(model)
        if model in compiled:
            compiled.remove(model)

    monkeypatch.setattr(runner._Model, "compile", counted)
    monkeypatch.setattr(runner._Model, "close", closed)
    found = verified(bundle)
    assert found.passed
    assert most == [1, 1]
    assert {check.case for check in found.checks} == {check.case for check in expected.checks}
    for file in ("openvino.onnx", "openvino_unpadded.onnx"):
        path = tampered(bundle, tmp_path / file / "bundle", negate_some_features, file)
        assert {check.graph for check in verified(bundle, path).failed} == {BOTH}
