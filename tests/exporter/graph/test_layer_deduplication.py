"""Layers that are traced once: the graph is the one that tracing all of them gives."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

import hdexport.graph.tracing
from hdexport.attention.interface import use_operators
from hdexport.attention.registry import attention_from_spec
from hdexport.build import BuildOptions, build
from hdexport.graph.layer_deduplication import (
    DOMAIN,
    DUPLICATE,
    INPUTS,
    OUTPUTS,
    TRACED,
    CopyDuplicateLayers,
    deduplicated_layers,
)
from hdexport.model.graph_module import GraphModule, graph_inputs
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ExportError
from support.graph_fingerprints import fingerprint
from support.tiny_models import save_tiny_model

FLOAT = ir.TensorType(ir.DataType.FLOAT)


def copies(caplog: pytest.LogCaptureFixture) -> int:
    """Layers of the last trace that were not traced."""
    counts = [record.args[0] for record in caplog.records if "are copies of a traced layer" in record.message]
    caplog.clear()
    return sum(counts)


MODELS: dict[str, tuple[str, dict[str, Any], str | None, int]] = {
    "windows of ours": ("bert", {"num_hidden_layers": 2}, "window:8", 1),
    "one layer called again": ("albert", {"num_hidden_layers": 3}, None, 2),
    # Its sizes have two names until the first layer proves them equal.
    "Longformer's windows": ("longformer", {"attention_window": [8, 8]}, None, 1),
    "BigBird's tables, of which each layer has its own": ("big_bird", {}, "bigbird:mode=table", 1),
    # The first layer lacks a normalisation, and every other one attends to all.
    "two alternating kinds": ("modernbert", {"num_hidden_layers": 4, "global_attn_every_n_layers": 2}, None, 1),
}


# The tiny models of test_families.py have repeated layers, and their graphs give the right answers every day.
@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_that_of_all_layers_traced(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model_type, changes, attention, expected_copies = MODELS[name]
    save_tiny_model(tmp_path / "model", model_type, Task.FEATURE_EXTRACTION, **changes)
    caplog.set_level(logging.INFO, logger="hdexport.graph.layer_deduplication")

    def built(output: str) -> list[ir.Model]:
        asked = attention_from_spec(attention)
        bundle = tmp_path / output
        build(BuildOptions(model=tmp_path / "model", output=bundle, max_len=100, attention=asked, verify=None))
        return [ir.load(bundle / file) for file in ("model.onnx", "onnxruntime_cpu.onnx")]

    once = built("once")
    assert copies(caplog) == expected_copies
    monkeypatch.setattr(hdexport.graph.tracing, "deduplicated_layers", lambda module: contextlib.nullcontext())
    every = built("every")
    assert copies(caplog) == 0
    assert [fingerprint(model) for model in once] == [fingerprint(model) for model in every]


def scaled_twice(first: float, second: float, *, domain: str = "") -> ir.Model:
    x, (a, b) = ir.Value(name="x", type=FLOAT), [ir.Value(name=name, type=FLOAT) for name in "ab"]
    for value, number in ((a, first), (b, second)):
        value.const_value = ir.tensor(np.array([number], np.float32), name=value.name)
    inner = ir.node("Mul", [x, a])
    outer = ir.node("Mul", [inner.outputs[0], b], domain=domain)
    outer.outputs[0].name = "y"
    return ir.Model(ir.Graph([x], [outer.outputs[0]], nodes=[inner, outer], initializers=[a, b]), ir_version=10)


def test_fingerprints_tell_weights_and_operators_apart() -> None:
    assert fingerprint(scaled_twice(2, 3)) == fingerprint(scaled_twice(2, 3))
    assert fingerprint(scaled_twice(2, 3)) != fingerprint(scaled_twice(3, 2))
    assert fingerprint(scaled_twice(2, 3)) != fingerprint(scaled_twice(2, 3, domain="other"))


def module_of(tmp_path: Path, *, layers: int) -> GraphModule:
    model = save_tiny_model(tmp_path, "bert", Task.FEATURE_EXTRACTION, num_hidden_layers=layers)
    use_operators(model)
    return GraphModule(model, Task.FEATURE_EXTRACTION, inputs=graph_inputs(token_types=0)).eval()


def test_a_layer_that_computes_something_else_is_traced(tmp_path: Path) -> None:
    module = module_of(tmp_path, layers=11)
    _, epsilon, activation, shape, method, hook, training, tied, *scaled, _ = module.model.encoder.layer
    epsilon.output.LayerNorm.eps = 0.5
    activation.intermediate.intermediate_act_fn = torch.nn.ReLU()
    shape.intermediate.dense, shape.output.dense = torch.nn.Linear(32, 5), torch.nn.Linear(5, 32)
    method.feed_forward_chunk = lambda attended: attended
    hook.register_forward_hook(lambda module, arguments, output: output + 1)
    training.output.dropout.train()
    tied.attention.self.key = tied.attention.self.query
    for number, layer in enumerate(scaled):
        layer.scale = torch.tensor(float(number))  # no parameter, no buffer
    ids = torch.arange(10)[None]
    with torch.inference_mode(), deduplicated_layers(module):
        nodes = torch.export.export(module, (ids, torch.ones_like(ids)), strict=False).graph.nodes
    marks = Counter(node.args[1] for node in nodes if node.kwargs.get("domain") == DOMAIN)
    assert marks == {INPUTS: 10, OUTPUTS: 10, DUPLICATE: 1}


def test_layers_are_as_before_whatever_happens(tmp_path: Path) -> None:
    module = module_of(tmp_path, layers=3)
    layers = module.model.encoder.layer
    layers[1].forward = forward = layers[1].forward
    before = [dict(vars(layer)) for layer in layers]
    with contextlib.suppress(ZeroDivisionError), deduplicated_layers(module):
        assert all("forward" in vars(layer) for layer in layers)
        raise ZeroDivisionError
    assert [dict(vars(layer)) for layer in layers] == before
    assert layers[1].forward is forward


def test_outside_of_an_export_layers_compute(tmp_path: Path) -> None:
    module = module_of(tmp_path, layers=2)
    ids = torch.arange(10)[None]
    with torch.inference_mode():
        (expected,) = module(ids, torch.ones_like(ids))
        with deduplicated_layers(module):
            (actual,) = module(ids, torch.ones_like(ids))
    assert torch.equal(actual, expected)


def marked_model(*, weights_of_repeat: int = 1) -> ir.Model:
    """y = (x * a + shared) * b + shared, the second layer not traced."""
    x, a, b, shared = (ir.Value(name=name, type=FLOAT) for name in ("x", "a", "b", "shared"))
    for value, number in ((a, 2), (b, 3), (shared, 10)):
        value.const_value = ir.tensor(np.array([number], np.float32), name=value.name)
    mark = {"domain": DOMAIN, "attributes": {TRACED: 0}}
    start = ir.node(INPUTS, [x], **mark)
    scaled = ir.node("Mul", [start.outputs[0], a])
    constant = ir.node("Identity", [shared])
    moved = ir.node("Add", [scaled.outputs[0], constant.outputs[0]])
    end = ir.node(OUTPUTS, [moved.outputs[0], a], num_outputs=1, **mark)
    repeat = ir.node(DUPLICATE, [end.outputs[0], *[b] * weights_of_repeat], num_outputs=1, **mark)
    repeat.outputs[0].name = "y"
    nodes = [start, scaled, constant, moved, end, repeat]
    return ir.Model(ir.Graph([x], repeat.outputs, nodes=nodes, initializers=[a, b, shared]), ir_version=10)


def test_a_copy_has_weights_of_its_own_and_shares_the_rest() -> None:
    model = marked_model()
    copying = CopyDuplicateLayers()
    copying(model)
    assert copying.copies == 1
    assert [node.op_type for node in model.graph] == ["Mul", "Identity", "Add", "Mul", "Add"]
    first_mul, constant, first_add, second_mul, second_add = model.graph
    assert [value.name for value in first_mul.inputs] == ["x", "a"]
    assert list(second_mul.inputs) == [first_add.outputs[0], model.graph.initializers["b"]]
    assert list(second_add.inputs) == [second_mul.outputs[0], constant.outputs[0]]
    assert [value.name for value in model.graph.outputs] == ["y"]
    assert model.graph.outputs[0] is second_add.outputs[0]


@pytest.mark.parametrize("weights", [0, 2])
def test_a_layer_that_does_not_fit_the_one_it_repeats_is_refused(weights: int) -> None:
    with pytest.raises(ExportError, match="other inputs, outputs or weights than the layer that it duplicates"):
        CopyDuplicateLayers()(marked_model(weights_of_repeat=weights))
