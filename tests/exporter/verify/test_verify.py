"""Verification passes right bundles; what it compares answers by refuses wrong ones."""

from __future__ import annotations

import dataclasses
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from hdexport.checkpoint import find_checkpoint
from hdexport.support.bundle_writer import seal
from hdexport.verify import Grid, Verification, verify_bundle
from hdexport.verify.comparison import compare
from hdexport.verify.pytorch_reference import reference_of
from hdruntime.bundle.reader import open_bundle
from support.tampered_bundles import positions_used


def verified(path: Path, checkpoint: Path) -> tuple[Verification, list[str]]:
    """A bundle's verification over the full grid, and its lines."""
    bundle = open_bundle(path)
    lines: list[str] = []
    reference = reference_of(bundle, find_checkpoint(checkpoint))
    return verify_bundle(bundle, reference, grid=Grid.FULL, report=lines.append), lines


@pytest.mark.parametrize(("model_type", "clipped"), [("bert", set()), ("mpnet", {128, 129, 130, 257})])
def test_a_right_bundle_passes_every_check(tiny_bundles, model_type: str, clipped: set[int]) -> None:
    """Around the length from which distances are clipped, too."""
    bundle = tiny_bundles(model_type)
    found, lines = verified(bundle.path, bundle.checkpoint)
    checks = found.checks
    assert all(check.passed for check in checks)
    assert {check.graph for check in checks} == {"model.onnx", "onnxruntime_cpu.onnx"}
    assert {check.case.tokens for check in checks} == {1, 2, 63, 64, 65, 128, 300} | clipped
    assert {check.case.batch for check in checks} == {1, 3}
    assert {check.case.padding for check in checks} == {"none", "right", "left"}
    unchecked = (
        "onnxruntime_cuda.onnx: not checked: that needs an NVIDIA GPU "
        "(hdexport verify BUNDLE --backend onnxruntime_cuda)"
    )
    assert [line for line in lines if not line.startswith("-[x]")] == [f"-[-] {unchecked}"]
    assert found.passed
    assert found.record()["grid"] == "full"
    assert found.record()["not_checked"] == [unchecked]


def test_positions_of_another_alpha_fail_beyond_the_checkpoint_only(tiny_bundles, tmp_path) -> None:
    right = tiny_bundles("bert")
    path = tmp_path / "bundle"
    shutil.copytree(right.path, path)
    positions = dataclasses.replace(right.manifest.positions, alpha=0.3)
    seal(path, dataclasses.replace(right.manifest, positions=positions))
    found, _ = verified(path, right.checkpoint)
    for check in found.checks:
        assert check.passed == (positions_used(check.case) <= 64), check.line()


WANTED = np.random.default_rng(0).normal(size=(5, 8))


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
