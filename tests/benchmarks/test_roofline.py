"""The work of a graph, against numbers worked out by hand and against PyTorch's own count of the model's operations."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.roofline.ceilings import Ceilings
from benchmarks.roofline.work import Work, roofline, work_of
from hdexport.model.task import AUTO_CLASS_OF_TASK
from hdexport.support.bundle_writer import seal
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ExportError
from support.grids import nightly_unless

WIDTH, INNER, HEADS, LAYERS = 32, 48, 4, 2
"""Of the tiny models."""

H100 = Ceilings(device="cuda", dtype="float16", matmul_flops_per_s=800e12, copy_bytes_per_s=3.0e12)


def operations_of_layers(tokens: int, pairs: int) -> int:
    """Projections of so many tokens, and products of so many pairs of tokens, summed over heads, in each layer."""
    projections = 2 * tokens * (4 * WIDTH**2 + 2 * WIDTH * INNER)
    return LAYERS * (projections + 2 * (2 * pairs * WIDTH // HEADS))


def operations_of_pytorch(checkpoint: Path, task: str, *, batch: int, tokens: int) -> int:
    """What PyTorch counts as the model runs; fused attention, which it would miss, is taken apart."""
    model = getattr(transformers, AUTO_CLASS_OF_TASK[Task(task)]).from_pretrained(checkpoint).eval()
    ids = torch.full((batch, tokens), 7)
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("model_type", "task"),
    [("roberta", "text-classification"), nightly_unless(False, "modernbert", "feature-extraction")],
)
def test_dense_operations_are_those_that_pytorch_counts(
    model_type: str, task: str, tiny_bundles: Callable[..., Any]
) -> None:
    """A head over one token of a text, one over all of them, and windows that PyTorch computes densely."""
    built = tiny_bundles(model_type, task)
    for batch, tokens in ((1, 61), (3, 40)):
        work = work_of(built.path, batch=batch, tokens=tokens)
        assert work.dense_flops == operations_of_pytorch(built.checkpoint, task, batch=batch, tokens=tokens)
        assert (work.flops < work.dense_flops) == (model_type == "modernbert")


@pytest.fixture(scope="module")
def windowed(tiny_bundles: Callable[..., Any]) -> Any:
    return tiny_bundles("bert", attention="window:16,global:0")


def test_windows_are_as_calculated_by_hand(windowed: Any) -> None:
    work = work_of(windowed.path, batch=1, tokens=300)
    assert work.dense_flops == operations_of_layers(300, HEADS * 300**2)
    # 33 keys a query, but where the window hangs over an end of the text.
    assert work.flops == operations_of_layers(300, HEADS * (33 * 300 - 16 * 17))
    eight = work_of(windowed.path, batch=8, tokens=300)
    assert (eight.flops, eight.dense_flops) == (8 * work.flops, 8 * work.dense_flops)


@pytest.mark.parametrize(("batch", "tokens", "words"), [(1, 100, 100), (2, 100, 120)])
def test_weights_move_once_and_of_tables_only_what_is_looked_up(
    batch: int, tokens: int, words: int, windowed: Any
) -> None:
    """The table of words has 120 rows and that of token types 2; that of positions gives one row per token."""
    matrices = LAYERS * (4 * WIDTH**2 + 2 * WIDTH * INNER)
    # Biases, and two normalisations in each layer and one before them.
    vectors = LAYERS * (4 * WIDTH + WIDTH + INNER + 2 * (2 * WIDTH)) + 2 * WIDTH
    rows = words + 2 + tokens
    moved_bytes = work_of(windowed.path, batch=batch, tokens=tokens).moved_bytes
    exact = 4 * (matrices + vectors + rows * WIDTH) + batch * tokens * (3 * 8 + 4 * WIDTH)
    # Beside them the graph holds a few numbers: shapes, axes, the scale.
    assert exact <= moved_bytes < exact + 256


def test_keys_behind_a_query_are_counted_only_had_attention_been_dense(tiny_bundles: Callable[..., Any]) -> None:
    """Two layers of Transformer-XL, with four heads of 8; the pairs of every operator are in test_pairs.py."""
    work = work_of(tiny_bundles("transfo-xl").path, batch=1, tokens=30)
    assert work.dense_flops - work.flops == 2 * 3 * 2 * (30 * 29 // 2) * 32


def test_work_that_is_not_understood_is_not_left_out(tiny_bundles: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    built = tiny_bundles("roberta", "text-classification")
    shutil.copytree(built.path, path)
    model = ir.load(path / "model.onnx")
    node = next(node for node in model.graph if node.op_type == "MatMul")
    node.op_type = "Einsum"
    node.attributes.add(ir.AttrString("equation", "bij,jk->bik"))
    ir.save(model, path / "model.onnx")
    seal(path, built.manifest)
    with pytest.raises(ExportError, match="product of type Einsum"):
        work_of(path, batch=1, tokens=64)


def test_what_takes_longer_bounds_the_latency() -> None:
    products = Work(flops=800_000_000_000, dense_flops=1, moved_bytes=3_000_000)
    assert roofline(products, H100, p50_ms=4.0).bound_ms == 1.0
    moves = Work(flops=800_000_000, dense_flops=1, moved_bytes=6_000_000_000)
    found = roofline(moves, H100, p50_ms=4.0)
    assert (found.bound_ms, found.fraction) == (2.0, 0.5)
    assert (found.flops, found.dense_flops, found.moved_bytes) == (800_000_000, 1, 6_000_000_000)
