"""Verification passes right bundles, and fails wrong ones and says where."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from hdexport.checkpoint import find_checkpoint
from hdexport.verify import Check, Grid, Verification, verify_bundle
from hdexport.verify.comparison import compare
from hdexport.verify.pytorch_reference import reference_of
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.writer import seal
from hdruntime.errors import ModelError


def verified(path: Path, checkpoint: Path, grid: Grid = Grid.FULL, **options) -> tuple[Verification, list[str]]:
    """A bundle's verification and its lines."""
    bundle = open_bundle(path)
    lines: list[str] = []
    reference = reference_of(bundle, find_checkpoint(checkpoint))
    return verify_bundle(bundle, reference, grid=grid, report=lines.append, **options), lines


def positions_used(check: Check) -> int:
    """Positions that real tokens of a BERT's batch have: padding on the left shifts them."""
    return check.case.tokens if check.case.padding == "left" else max(check.case.lengths)


@pytest.fixture
def tampered(tiny_bundles, tmp_path) -> Callable[..., tuple[Path, Path]]:
    """A sealed copy of the tiny BERT's bundle after a change to one of its graphs; and its checkpoint."""

    def make(file: str, change: Callable[[ir.Model], None]) -> tuple[Path, Path]:
        right = tiny_bundles("bert")
        path = tmp_path / "bundle"
        shutil.copytree(right.path, path)
        model = ir.load(path / file)
        change(model)
        ir.save(model, path / file)
        seal(path, right.manifest)
        return path, right.checkpoint

    return make


@pytest.mark.parametrize("model_type", ["bert", "roberta", "mpnet"])
def test_a_right_bundle_passes_every_check(tiny_bundles, model_type: str) -> None:
    bundle = tiny_bundles(model_type)
    found, lines = verified(bundle.path, bundle.checkpoint)
    checks = found.checks
    assert all(check.passed for check in checks)
    assert {check.graph for check in checks} == {"model.onnx", "onnxruntime_cpu.onnx"}
    assert {check.case.tokens for check in checks} == {1, 2, 63, 64, 65, 128, 300}
    assert {check.case.batch for check in checks} == {1, 3}
    assert {check.case.padding for check in checks} == {"none", "right", "left"}
    unchecked = "onnxruntime_cuda.onnx: not checked: that needs an NVIDIA GPU"
    assert [line for line in lines if not line.startswith("-[x]")] == [f"-[-] {unchecked}"]
    assert found.passed
    assert found.record()["grid"] == "full"
    assert found.record()["not_checked"] == [unchecked]


@pytest.mark.parametrize("file", ["model.onnx", "onnxruntime_cpu.onnx"])
def test_a_graph_that_freezes_a_length_fails_at_the_others(tampered, file: str) -> None:
    def use_positions_of_64_tokens(model: ir.Model) -> None:
        # Every token from the 64th on gets the last row: what an index clamped at the traced length does.
        table = next(value for name, value in model.graph.initializers.items() if "position" in name)
        rows = table.const_value.numpy().copy()
        rows[64:] = rows[63]
        table.const_value = ir.tensor(rows, name=table.name)

    found, lines = verified(*tampered(file, use_positions_of_64_tokens))
    for check in found.checks:
        assert check.passed == (check.graph != file or positions_used(check) <= 64), check.line()
    assert any("-[ ]" in line and "tokens 65" in line and "FAILED: last_hidden_state" in line for line in lines)
    record = found.record()
    assert record["passed"] is False
    assert {case["tokens"] for case in record["graphs"][file]["failed"]} == {65, 128, 300}  # 65 where all are real


def test_a_graph_that_ignores_the_mask_fails_where_there_is_padding(tampered) -> None:
    def see_everything(model: ir.Model) -> None:
        mask = next(node for node in model.graph if node.op_type == "DenseAttention").inputs[3]
        producer = mask.producer()
        always = ir.node("Greater", [producer.inputs[0], producer.inputs[0]])
        never = ir.node("Not", [always.outputs[0]])
        model.graph.insert_after(producer, [always, never])
        ir.convenience.replace_all_uses_with(mask, never.outputs[0])

    found, _ = verified(*tampered("model.onnx", see_everything))
    portable = [check for check in found.checks if check.graph == "model.onnx"]
    assert {check.case.padding for check in portable if check.passed} == {"none"}
    assert not any(check.passed for check in portable if check.case.padding != "none")


def test_positions_of_another_alpha_fail_beyond_the_checkpoint_only(tiny_bundles, tmp_path) -> None:
    right = tiny_bundles("bert")
    path = tmp_path / "bundle"
    shutil.copytree(right.path, path)
    positions = dataclasses.replace(right.manifest.positions, alpha=0.3)
    seal(path, dataclasses.replace(right.manifest, positions=positions))
    found, _ = verified(path, right.checkpoint)
    for check in found.checks:
        assert check.passed == (positions_used(check) <= 64), check.line()


@pytest.mark.parametrize("file", ["model.onnx", "onnxruntime_cpu.onnx"])
def test_a_graph_that_gives_nan_fails(tampered, file: str) -> None:
    def make_the_last_bias_nan(model: ir.Model) -> None:
        bias = model.graph.outputs[0].producer().inputs[2]
        bias.const_value = ir.tensor(np.full(bias.shape, np.nan, np.float32), name=bias.name)

    found, _ = verified(*tampered(file, make_the_last_bias_nan), Grid.QUICK)
    assert {check.graph for check in found.checks if not check.passed} == {file}
    assert not any(check.passed for check in found.checks if check.graph == file)
    json.dumps(found.record(), allow_nan=False)


def test_another_checkpoint_is_refused(tiny_bundles) -> None:
    bundle = open_bundle(tiny_bundles("bert").path)
    with pytest.raises(ModelError, match=r"built from a bert(.|\n)*--model"):
        reference_of(bundle, find_checkpoint(tiny_bundles("roberta").checkpoint))


WANTED = np.random.default_rng(0).normal(size=(5, 8))


@pytest.mark.parametrize("half_precision", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        np.roll(WANTED, 1, axis=0),
        -WANTED,
        np.zeros_like(WANTED),
        np.full_like(WANTED, np.nan),
        np.roll(WANTED, 1, axis=1),
    ],
    ids=["rows shifted", "negated", "zeros", "nan", "features shifted"],
)
def test_the_comparison_refuses_wrong_answers(wrong: np.ndarray, half_precision: bool) -> None:
    assert not compare(wrong, WANTED, half_precision=half_precision).passed


def test_the_comparison_takes_rounding_and_no_more() -> None:
    assert compare(WANTED + 0.9e-4, WANTED, half_precision=False).passed
    assert not compare(WANTED + 1.1e-4, WANTED, half_precision=False).passed
    assert compare(WANTED.astype(np.float16), WANTED, half_precision=True).passed


def test_a_half_precision_answer_of_another_length_is_refused() -> None:
    assert not compare(WANTED * 1.5, WANTED, half_precision=True).passed


def test_one_wrong_row_of_many_is_enough() -> None:
    wrong = WANTED.copy()
    wrong[3] = wrong[2]
    assert not compare(wrong, WANTED, half_precision=True).passed


def test_the_comparison_of_slices_is_that_of_the_whole(monkeypatch) -> None:
    large = np.full((5, 8), 1e6)
    for got, want in ((WANTED * 1.01, WANTED), (WANTED, WANTED), (np.r_[WANTED, large], np.r_[WANTED, large])):
        for half_precision in (False, True):
            monkeypatch.setattr("hdexport.verify.comparison._SLICE_VALUES", 2**18)
            whole = compare(got, want, half_precision=half_precision)
            monkeypatch.setattr("hdexport.verify.comparison._SLICE_VALUES", 16)
            assert compare(got, want, half_precision=half_precision) == whole
    wrong = WANTED.copy()
    wrong[4, 7] = np.inf
    assert compare(wrong, WANTED, half_precision=False).tolerance == "finite values"


def test_the_comparison_makes_no_copy_of_a_large_output() -> None:
    got = np.zeros((4096, 2048), np.float32)
    tracemalloc.start()
    assert compare(got, got, half_precision=False).passed
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < got.nbytes
