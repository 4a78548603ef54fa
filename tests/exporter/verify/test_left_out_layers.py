"""The quick grid leaves layers out of long texts that repeat others with other weights, in graphs and in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest

from hdexport.checkpoint import find_checkpoint
from hdexport.verify import Grid, Verification, verify_bundle
from hdexport.verify.pytorch_reference import reference_of
from hdruntime.bundle.reader import open_bundle
from support.tampered_bundles import tampered
from support.tiny_models import BASE

GRAPHS = ("model.onnx", "onnxruntime_cpu.onnx")


def verified(bundle, path, grid: Grid = Grid.QUICK) -> Verification:
    found = open_bundle(path)
    return verify_bundle(found, reference_of(found, find_checkpoint(bundle.checkpoint)), grid=grid)


def weight_of_layer(number: int) -> Callable[[ir.Model], None]:
    def change(model: ir.Model) -> None:
        value = next(
            value for name, value in model.graph.initializers.items() if f"layer.{number}.output.dense" in name
        )
        value.const_value = ir.tensor(value.const_value.numpy() * 1.1, name=value.name)

    return change


def last_position(model: ir.Model) -> None:
    value = next(value for name, value in model.graph.initializers.items() if "position" in name)
    rows = value.const_value.numpy().copy()
    rows[-1] = rows[0]
    value.const_value = ir.tensor(rows, name=value.name)


@pytest.mark.parametrize(
    ("model_type", "task"),
    [
        ("bert", "sentence-similarity"),
        # Global without a norm, local, local, global.
        ("modernbert", "feature-extraction"),
    ],
)
def test_long_texts_leave_out_the_layer_that_repeats_another(tiny_bundles, model_type: str, task: str) -> None:
    bundle = tiny_bundles(model_type, task)
    found = verified(bundle, bundle.path)
    assert found.passed
    assert {check.left_out for check in found.checks if check.case.tokens <= BASE + 1} == {0}
    assert {check.left_out for check in found.checks if check.case.tokens > BASE + 1} == {1}
    lines = [check.line() for check in found.checks if check.left_out]
    assert all("; without the layer that repeats another" in line for line in lines)


def test_openvinos_graphs_leave_out_the_same_layer_also_where_its_result_is_an_output(openvino_bundles) -> None:
    pytest.importorskip("openvino")
    bundle = openvino_bundles("bert", "sentence-similarity")
    found = verified(bundle, bundle.path)
    checks = [check for check in found.checks if check.graph.startswith("openvino") and check.left_out]
    assert checks
    assert found.passed, "\n".join(check.line() for check in found.checks)


@pytest.mark.parametrize(
    ("change", "is_wrong"),
    [
        # What long texts skip is wrong in short ones.
        (weight_of_layer(1), lambda tokens: tokens <= BASE + 1),
        (weight_of_layer(0), lambda tokens: True),
        (last_position, lambda tokens: tokens == 300),
    ],
    ids=["a copy's weight", "the traced layer's weight", "the last position"],
)
def test_a_wrong_weight_is_found_by_the_texts_that_read_it(
    tiny_bundles, tmp_path, change: Callable[[ir.Model], None], is_wrong: Callable[[int], bool]
) -> None:
    bundle = tiny_bundles("bert")
    found = verified(bundle, tampered(bundle, tmp_path / "wrong", change, *GRAPHS))
    assert not found.passed
    for check in found.checks:
        assert check.passed != is_wrong(check.case.tokens), check.line()


def test_a_graph_that_lost_the_places_of_its_layers_runs_whole(tiny_bundles, tmp_path) -> None:
    bundle = tiny_bundles("bert")

    def rename(model: ir.Model) -> None:
        value = next(value for node in model.graph for value in node.outputs if value.name == "layer_result.0.0")
        value.name = "other"

    checks = verified(bundle, tampered(bundle, tmp_path / "renamed", rename, "onnxruntime_cpu.onnx")).checks
    assert {check.left_out for check in checks} == {0}
    assert all(check.passed for check in checks)
