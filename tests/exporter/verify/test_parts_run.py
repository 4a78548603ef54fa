"""Verification of graphs part by part, as of models whose weights do not fit in the memory."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from hdexport.checkpoint import find_checkpoint
from hdexport.cli.flags import flag
from hdexport.cli.verification_table import print_verification
from hdexport.graph.targets.target import Changes
from hdexport.support.progress import Progress
from hdexport.verify import Grid, Verification, parts_run, verify_bundle
from hdexport.verify.graph_sets import graph_sets
from hdexport.verify.pytorch_reference import Reference, reference_of
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import HdexportError
from support.full_disks import in_mount_namespace, mount_disk
from support.tampered_bundles import tampered

SETS = ("model.onnx", "onnxruntime_cpu.onnx", "openvino.onnx and openvino_unpadded.onnx")


def reference_for(bundle) -> Reference:
    return reference_of(open_bundle(bundle.path), find_checkpoint(bundle.checkpoint))


def verified(bundle, memory_bytes: int | None = None, path: Path | None = None, **options) -> Verification:
    return verify_bundle(
        open_bundle(path or bundle.path),
        reference_for(bundle),
        grid=Grid.QUICK,
        precisions=[Precision.FLOAT32],
        memory_bytes=memory_bytes,
        **options,
    )


def of_a_layer(bundle) -> int:
    """Bytes of memory for less than the weights of a layer."""
    return 4 * bundle.manifest.parameters // 5


@pytest.mark.parametrize(
    ("model_type", "backend"),
    [
        ("qwen3", Backend.OPENVINO),
        *(
            pytest.param(model_type, backend, marks=pytest.mark.nightly)
            for model_type, backend in itertools.product(
                ("bert", "qwen3", "longformer", "big_bird", "deberta-v2", "modernbert", "transfo-xl"),
                (Backend.OPENVINO, Backend.ONNXRUNTIME),
            )
        ),
    ],
)
def test_parts_give_what_whole_graphs_give(openvino_bundles, model_type: str, backend: Backend) -> None:
    bundle = openvino_bundles(model_type)
    whole = verified(bundle, backend=backend)
    parts = verified(bundle, of_a_layer(bundle), backend=backend)
    assert whole.passed
    assert parts.passed
    assert [check.case for check in parts.checks] == [check.case for check in whole.checks]
    assert {check.case.batch for check in parts.checks} >= {1, 3}
    assert {check.case.padding for check in parts.checks} >= {"none", "right"}
    for cut, uncut in zip(parts.checks, whole.checks, strict=True):
        assert (cut.graph, cut.tolerance, uncut.parts) == (uncut.graph, uncut.tolerance, 1)
        assert cut.parts > 1
        # ONNX Runtime fuses other nodes of Transformer-XL's graph, whose values are larger.
        assert abs(cut.max_abs_error - uncut.max_abs_error) < (2e-6 if model_type == "transfo-xl" else 1e-6)
    assert parts.record().graphs.keys() == whole.record().graphs.keys()
    assert not [skip for skip in parts.skipped if skip not in whole.skipped]


def test_a_wrong_weight_in_one_part_is_found(openvino_bundles, tmp_path) -> None:
    def negate(model: ir.Model) -> None:
        product = [node for node in model.graph if node.op_type == "MatMul"][-1]
        weight = next(value for value in product.inputs if value.is_initializer())
        weight.const_value = ir.tensor(-weight.const_value.numpy(), name=weight.name)

    bundle = openvino_bundles("bert")
    path = tampered(bundle, tmp_path / "bundle", negate, "openvino_unpadded.onnx")
    found = verified(bundle, of_a_layer(bundle), path, backend=Backend.OPENVINO)
    record = found.record().graphs[SETS[-1]]
    assert record.parts > 3
    # The graph for batches without padding is wrong; the other one, which runs single tokens, is not.
    unpadded = [check for check in found.checks if check.case.padding == "none"]
    assert {check.case.tokens > 1 for check in unpadded} == {True, False}
    assert all(check.passed == (check.case.tokens == 1) for check in unpadded)


def set_of(bundle):
    """The set of the portable graph, cut into parts of less than a layer."""
    sets = graph_sets(bundle.manifest, Backend.ONNXRUNTIME, [Precision.FLOAT32], lambda skip: None)
    return dataclasses.replace(sets[0], part_bytes=of_a_layer(bundle))


def on_small_disk(path: Path, directory: Path) -> None:
    """Run parts on a disk that holds one part's weights and some of the values between parts."""
    bundle = open_bundle(path)
    mount_disk(directory, "1m")
    tempfile.tempdir = str(directory)
    rows = ({"input_ids": np.full((1, 64), row), "attention_mask": np.ones((1, 64), np.int64)} for row in range(100))
    opened = parts_run.opened_in_parts(bundle, set_of(bundle), Changes(), lambda: rows, Progress())
    try:
        with opened:
            print("ran")
    except HdexportError as error:
        print(error.message(flag).replace("\n", " "), os.listdir(directory))


def test_a_full_disk_leaves_nothing(tiny_bundles, tmp_path) -> None:
    bundle = tiny_bundles("qwen3")
    done = in_mount_namespace(on_small_disk, bundle.path, tmp_path / "disk")
    place = re.escape(str(tmp_path / "disk"))
    assert re.fullmatch(
        rf"The disk of {place} is full: the comparison with PyTorch needs more than [01]\.\d MB there\. "
        r"Set TMPDIR to a directory on a larger disk, or build without the comparison: --no-verify \[\]",
        done.stdout.splitlines()[-1],
    )


def test_an_interrupted_run_leaves_nothing(tiny_bundles, tmp_path, monkeypatch) -> None:
    bundle = tiny_bundles("qwen3")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    batch = {"input_ids": np.full((1, 9), 5), "attention_mask": np.ones((1, 9), np.int64)}
    seen = []

    def batches():
        yield batch
        seen.extend(path.name for path in tmp_path.rglob("*.npy"))
        if seen:
            raise KeyboardInterrupt

    opened = parts_run.opened_in_parts(open_bundle(bundle.path), set_of(bundle), Changes(), batches, Progress())
    with pytest.raises(KeyboardInterrupt), opened:
        pass
    assert seen
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_the_logits_of_some_tokens_are_computed_in_parts(openvino_bundles) -> None:
    bundle = openvino_bundles("bert", "fill-mask", vocab_size=20_000)
    limits = {"limit_bytes": 12 * 2**20, "backend": Backend.OPENVINO}
    whole, parts = verified(bundle, **limits), verified(bundle, of_a_layer(bundle), **limits)
    assert parts.passed
    assert [check.samples for check in parts.checks] == [check.samples for check in whole.checks]
    assert any(check.samples for check in parts.checks)
    assert min(check.parts for check in parts.checks) > 1
    for cut, uncut in zip(parts.checks, whole.checks, strict=True):
        assert abs(cut.max_abs_error - uncut.max_abs_error) < 1e-6


def test_the_table_says_in_how_many_parts_a_graph_was_compared(tiny_bundles, capsys) -> None:
    bundle = tiny_bundles("qwen3")
    record = verified(bundle, of_a_layer(bundle)).record()
    parts = record.graphs["model.onnx"].parts
    assert parts > 1
    print_verification(record, None)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("model.onnx"))
    assert row.endswith(f"in {parts} parts")
