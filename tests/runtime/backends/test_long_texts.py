"""Texts of 32768 tokens: memory of causal models, graphs with static shapes, and outputs that are not fetched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner
from hdruntime.backends.openvino import runner
from hdruntime.backends.openvino.runner import OpenVinoRunner
from hdruntime.backends.precision import Precision
from hdruntime.bundle.reader import open_bundle
from hdruntime.tasks.embedding import Embedding
from support.comparators import assert_close
from support.needs import needs_openvino

_GROWTH = """
import sys
import numpy as np

import hdruntime

def status(key):
    with open("/proc/self/status") as lines:
        return 1024 * int(next(line for line in lines if line.startswith(key + ":")).split()[1])

bundle, backend, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
session = hdruntime.load(bundle, backend, precision="float32", threads=1)
def run(tokens):
    session(input_ids=np.full((1, tokens), 7), attention_mask=np.ones((1, tokens), np.int64))
run(16)
before = status("VmRSS")
run(tokens)
print(status("VmHWM") - before)
"""


def growth_bytes(bundle: Any, backend: str, tokens: int) -> int:
    """Growth of a process's peak memory by one text, as Linux counts it."""
    command = [sys.executable, "-c", _GROWTH, str(bundle.path), backend, str(tokens)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.nightly
def test_memory_of_a_causal_model_is_linear_in_tokens_in_onnx_runtime(tiny_bundles: Callable[..., Any]) -> None:
    bundle = tiny_bundles("qwen3", "sentence-similarity", max_len=32_768, num_hidden_layers=4)
    short, long = (growth_bytes(bundle, "onnxruntime", tokens) for tokens in (8192, 32_768))
    assert long < 4.5 * short, f"{long / short:.1f} times the memory of a fourth of the tokens"


@needs_openvino
@pytest.mark.nightly
def test_openvino_has_no_float_for_each_query_and_key(openvino_bundles: Callable[..., Any]) -> None:
    """Four layers of one head's scores, or of a float mask, would be 1 GiB each."""
    bundle = openvino_bundles("qwen3", "sentence-similarity", max_len=32_768, num_hidden_layers=4)
    tokens = 16_384
    grown = growth_bytes(bundle, "openvino", tokens)
    assert grown < tokens**2, f"{grown / tokens**2:.2f} bytes for each query and key"


def test_the_states_of_tokens_are_not_fetched_beside_an_embedding(tiny_bundles: Callable[..., Any]) -> None:
    opened = open_bundle(tiny_bundles("qwen3", "sentence-similarity").path)
    assert {spec.name for spec in opened.manifest.outputs} == {"last_hidden_state", "sentence_embedding"}
    outputs = Embedding(opened.manifest, None).outputs
    runner, fetched = OnnxRuntimeRunner(opened, threads=1), []
    session = runner._session

    class Watched:
        def run(self, names: Any, inputs: Any, options: Any) -> Any:
            fetched.append(list(names))
            return session.run(names, inputs, options)

    runner._session = Watched()
    ids = np.full((1, 5), 7)
    results = runner.start({"input_ids": ids, "attention_mask": np.ones_like(ids)}, outputs)()
    assert fetched == [["sentence_embedding"]] == [list(results)]


class WatchedCore:
    """OpenVINO's ``Core``, and the models that it compiled."""

    def __init__(self, core: Any) -> None:
        self._core, self.compiled = core, list[Any]()

    def read_model(self, path: str) -> Any:
        return self._core.read_model(path)

    def compile_model(self, *given: Any) -> Any:
        self.compiled.append(self._core.compile_model(*given))
        return self.compiled[-1]


def padded_on_the_left(rows: int, tokens: int) -> dict[str, Any]:
    mask = np.ones((rows, tokens), np.int64)
    mask[:, : tokens // 3] = 0
    return {"input_ids": np.random.default_rng(tokens).integers(5, 60, (rows, tokens)), "attention_mask": mask}


@needs_openvino
def test_a_large_batch_has_a_graph_of_its_sizes_and_of_what_is_fetched(
    openvino_bundles: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = OpenVinoRunner(
        open_bundle(openvino_bundles("qwen3", "sentence-similarity", max_len=32_768, num_hidden_layers=4).path),
        threads=1,
        precision=Precision.FLOAT32,
    )
    outputs = ["sentence_embedding", "last_hidden_state"]
    batches = [padded_on_the_left(rows, tokens) for rows, tokens in ((1, 1024), (2, 1100))]
    for batch in batches[:]:
        batches.append({**batch, "attention_mask": np.ones_like(batch["attention_mask"])})
    expected = [opened.start(batch, outputs)() for batch in batches]
    core = WatchedCore(opened._padded._core)
    for model in (opened._padded, opened._unpadded):
        monkeypatch.setattr(model, "_core", core)
    for name in ("_STATIC_SHAPE_WORK", "_STATIC_SHAPE_TOKENS"):
        monkeypatch.setattr(runner, name, 1)
    for batch, each in zip(batches, expected, strict=True):
        for fetched in (outputs, outputs[:1]):
            results = opened.start(batch, fetched)()
            assert list(results) == fetched
            for name in fetched:
                assert_close(results[name], each[name], atol=2e-5)
            compiled = core.compiled.pop()
            assert not core.compiled
            assert {value.any_name for value in compiled.outputs} == set(fetched)
            assert all(list(value.shape) == [*batch["input_ids"].shape] for value in compiled.inputs)
    monkeypatch.undo()
    again = opened.start(batches[1], outputs)()
    assert_close(again["last_hidden_state"], expected[1]["last_hidden_state"], atol=0)


@needs_openvino
@pytest.mark.parametrize("padded", [True, False])
def test_no_graph_with_static_shapes_holds_the_masks_of_its_layers(
    openvino_bundles: Callable[..., Any], padded: bool
) -> None:
    """They would be a byte for each query and key of each layer."""
    opened = OpenVinoRunner(
        open_bundle(openvino_bundles("qwen3", "sentence-similarity", max_len=32_768, num_hidden_layers=4).path),
        threads=1,
        precision=Precision.FLOAT32,
    )
    tokens = 1024
    model = opened._padded if padded else opened._unpadded
    shapes = {"input_ids": (1, tokens), "attention_mask": (1, tokens)}
    model.compile(runner._StaticShapes(shapes, frozenset({"sentence_embedding"})))
    graph = model._request.get_compiled_model().get_runtime_model()
    masks = {"Const": 0, "Eltwise": 0}
    for node in graph.get_ops():
        kind = str(node.get_rt_info()["layerType"].astype(str))
        if kind in masks and node.get_output_size():
            masks[kind] += list(node.output(0).shape)[-2:] == [tokens // 4, tokens]
    assert masks["Const"] == 0
    assert masks["Eltwise"] >= opened.manifest.num_layers
