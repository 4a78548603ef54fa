"""Inputs that a graph computes itself are those that the runtime feeds, for rows with padding on either side."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

import hdruntime
from hdexport.graph.passes.fold_default_inputs import FoldDefaultInputs
from hdexport.package.check import COSINES
from hdexport.package.write import PackageOptions, package_bundle
from hdruntime.bundle.manifest import Default, Fill, InputSpec, Role
from hdruntime.bundle.reader import open_bundle
from hdruntime.inference.inputs import checked_inputs
from support.onnx_models import parsed_model
from support.tiny_bundle import make_bundle

SEPARATOR = 3
IDS = np.array([[2, 5, 3, 6, 3], [2, 5, 6, 3, 0], [0, 0, 2, 5, 3], [2, 3, 0, 0, 0], [2, 5, 6, 7, 8]])
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])


def integers(name: str, role: Role, fill: Fill, token_id: int | None = None) -> InputSpec:
    default = Default(fill=fill, token_id=token_id)
    return InputSpec(name=name, dtype="int64", shape=("batch", "tokens"), role=role, default=default)


def state(name: str, fill: Fill, *shape: str | int, bound: int | None = None) -> InputSpec:
    default, axes = Default(fill=fill), ("batch", *shape)
    role, new = Role.RECURRENT_STATE, f"new_{name}"
    return InputSpec(name=name, dtype="float32", shape=axes, role=role, default=default, bound=bound, fed_from=new)


CASES = {
    "first token": [integers("marks", Role.GLOBAL_ATTENTION_MASK, Fill.FIRST_TOKEN)],
    "no token": [integers("marks", Role.GLOBAL_ATTENTION_MASK, Fill.ZEROS)],
    "one type": [integers("types", Role.TOKEN_TYPES, Fill.ZEROS)],
    "types after a token": [integers("types", Role.TOKEN_TYPES, Fill.AFTER_TOKEN, SEPARATOR)],
    "one token of memory": [state("memory", Fill.ZEROS, "memory", 2, bound=7), state("count", Fill.ZEROS, 1)],
    "a memory that is seen": [state("memory", Fill.ONES, "memory", 2, bound=7)],
}


@pytest.mark.parametrize("case", CASES)
def test_a_folded_input_is_the_runtimes_default(case: str, tmp_path: Path) -> None:
    specs = CASES[case]
    manifest = open_bundle(make_bundle(tmp_path)).manifest
    assert manifest.tokenizer is not None
    manifest = dataclasses.replace(
        manifest,
        inputs=(*manifest.inputs[:2], *specs),
        tokenizer=dataclasses.replace(manifest.tokenizer, token_types=False),
    )
    shapes = {
        spec.name: f"{'int64' if spec.dtype == 'int64' else 'float'}[{', '.join(map(str, spec.shape))}]"
        for spec in manifest.inputs
    }
    outputs = {f"out_{spec.name}": shapes[spec.name] for spec in specs}
    outputs |= {spec.fed_from: shapes[spec.name] for spec in specs if spec.fed_from}
    nodes = "\n".join(f"{name} = Identity({name[4:]})" for name in outputs)
    model = ir.from_proto(parsed_model(shapes, outputs, nodes, {}))
    assert FoldDefaultInputs(manifest)(model).modified
    assert [value.name for value in model.graph.inputs] == ["input_ids", "attention_mask"]
    assert [value.name for value in model.graph.outputs] == [f"out_{spec.name}" for spec in specs]
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    given = {"input_ids": IDS, "attention_mask": MASK}
    expected = checked_inputs(given, manifest, memory=manifest.min_memory)
    for spec, found in zip(specs, session.run(None, given), strict=True):
        np.testing.assert_array_equal(found, expected[spec.name])


def test_masks_of_all_tokens_are_the_attention_mask(tmp_path: Path) -> None:
    """The runtime's own default is 1 for padding, too, which no graph looks at."""
    specs = [integers("pooled", Role.POOLED, Fill.ONES), integers("attended", Role.ATTENDED, Fill.ONES)]
    manifest = open_bundle(make_bundle(tmp_path)).manifest
    manifest = dataclasses.replace(manifest, inputs=(*manifest.inputs[:2], *specs))
    shapes = dict.fromkeys(("input_ids", "attention_mask", "pooled", "attended"), "int64[batch, tokens]")
    model = ir.from_proto(
        parsed_model(
            shapes,
            {"a": "int64[batch, tokens]", "b": "int64[batch, tokens]"},
            "a = Identity(pooled) b = Identity(attended)",
            {},
        )
    )
    FoldDefaultInputs(manifest)(model)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    for found in session.run(None, {"input_ids": IDS, "attention_mask": MASK}):
        np.testing.assert_array_equal(found, MASK)


def test_a_packages_graph_has_the_outputs_of_a_padded_batch(tiny_bundles: Any, tmp_path: Path) -> None:
    """Of Longformer, whose first token has global attention."""
    bundle = open_bundle(tiny_bundles("longformer", "text-classification").path)
    package_bundle(bundle, PackageOptions(target="onnx", output=tmp_path / "package", check=False))
    session = onnxruntime.InferenceSession(tmp_path / "package" / "model.onnx")
    assert [each.name for each in session.get_inputs()] == ["input_ids", "attention_mask"]
    given = {"input_ids": IDS, "attention_mask": MASK}
    with hdruntime.load(bundle.path, "onnxruntime", threads=1) as runtime:
        expected = runtime(**given)["logits"]
        without = runtime(**given, global_attention_mask=np.zeros_like(IDS))["logits"]
    (found,) = session.run(None, given)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(found - without).max() > 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("longformer", {"task": "sentence-similarity"}),
        ("xlnet", {"recurrence": 64}),
        ("transfo-xl", {"recurrence": 64}),
        ("bert", {"task": "sentence-similarity", "attention": "window:64,right:0,global:0", "recurrence": 64}),
    ],
)
def test_a_package_computes_the_outputs_of_whole_texts(
    model_type: str, options: dict[str, Any], tiny_bundles: Any, tmp_path: Path
) -> None:
    """Of up to 3 000 words, in far more tokens than a memory holds."""
    bundle = open_bundle(tiny_bundles(model_type, max_len=4096, **options).path)
    found = package_bundle(bundle, PackageOptions(target="onnx", output=tmp_path / "package"))
    assert min(each.cosine for each in found.compared) > COSINES["float32"]
    graph = onnxruntime.InferenceSession(tmp_path / "package" / "model.onnx")
    assert {each.name for each in graph.get_inputs()} <= {"input_ids", "attention_mask", "token_type_ids"}
    assert not any(each.name.startswith("mems") for each in graph.get_outputs())
