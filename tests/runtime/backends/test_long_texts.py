"""Texts of 32768 tokens: memory of causal models, graphs with static shapes, and outputs that are not fetched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModel

from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner
from hdruntime.backends.openvino import runner
from hdruntime.backends.openvino.runner import OpenVinoRunner
from hdruntime.backends.precision import Precision
from hdruntime.bundle.reader import open_bundle
from hdruntime.tasks.embedding import Embedding
from support.comparators import assert_close, assert_same_directions
from support.needs import needs_openvino, openvino_computes_bfloat16

TOKENS = 32_768
SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": TOKENS,
    "initializer_range": 0.02,
    "ffn_chunk": 256,
}
"""Four layers of Qwen3-Embedding-0.6B, whose feed-forward networks run in chunks in ONNX Runtime."""

_GROWTH = """
import sys
import numpy as np

import hdruntime
from hdruntime.text.encoding import Encoding

def status(key):
    with open("/proc/self/status") as lines:
        return 1024 * int(next(line for line in lines if line.startswith(key + ":")).split()[1])

bundle, backend, precision, text, embedding = sys.argv[1:]
session = hdruntime.load(bundle, backend, precision=precision, threads=2)
ids = np.load(text)

def embed(ids):
    (found,) = session.infer([Encoding(input_ids=ids)], outputs=["sentence_embedding"])
    return found["sentence_embedding"]

embed(ids[0, :16])
before = status("VmRSS")
np.save(embedding, embed(ids[0])[None])
print(status("VmHWM") - before)
"""


def text_of_parts(tokens: int) -> np.ndarray:
    """Ids, int64 [1, tokens], four in each sixteenth of the text: attention that misses a part means other words."""
    return 8 + 4 * (np.arange(tokens) * 16 // tokens)[None] + np.random.default_rng(0).integers(0, 4, (1, tokens))


def embedding_by_pytorch(checkpoint: Path, ids: np.ndarray) -> np.ndarray:
    """The embedding, float32 [1, hidden], as the modules of the checkpoint define it: normalized means."""
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        mean = model(torch.from_numpy(ids)).last_hidden_state.mean(1)
    return torch.nn.functional.normalize(mean).numpy()


def growth_bytes(bundle: Any, backend: str, precision: str, text: Path, embedding: Path) -> int:
    """Growth of a process's peak memory by one text, as Linux counts it; its embedding is saved."""
    command = [sys.executable, "-c", _GROWTH, *map(str, (bundle.path, backend, precision, text, embedding))]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


class LongText(NamedTuple):
    """A text of `TOKENS` tokens.

    Attributes:
        file: its ids, in NumPy's format.
        embedding: of PyTorch in float32, [1, hidden].
    """

    file: Path
    embedding: np.ndarray


@pytest.fixture(scope="module")
def long_text(tiny_bundles: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> LongText:
    checkpoint = tiny_bundles("qwen3", "sentence-similarity", max_len=TOKENS, **SHAPE).checkpoint
    ids, file = text_of_parts(TOKENS), tmp_path_factory.mktemp("text") / "ids.npy"
    np.save(file, ids)
    return LongText(file, embedding_by_pytorch(checkpoint, ids))


@needs_openvino
@pytest.mark.nightly
@pytest.mark.xdist_group("a long text")
@pytest.mark.parametrize(
    ("backend", "precision", "cosine", "most_bytes"),
    [
        ("onnxruntime", "float32", 1 - 1e-6, 2.1e9),
        pytest.param("openvino", "bfloat16", 0.9995, 2.0e9, marks=openvino_computes_bfloat16),
    ],
)
def test_memory_of_32768_tokens_is_bounded_and_the_embedding_is_right(
    openvino_bundles: Callable[..., Any],
    long_text: LongText,
    tmp_path: Path,
    backend: str,
    precision: str,
    cosine: float,
    most_bytes: float,
) -> None:
    """A byte for each query and key would be 1.1 GB, scores of a head in float32 4.3 GB.

    Measured 2.01 GB in ONNX Runtime and 1.78 in OpenVINO. The largest cosine below 1 that a part of the queries without
    another part of the keys gave is 0.995 (2048 tokens).
    """
    bundle = openvino_bundles("qwen3", "sentence-similarity", max_len=TOKENS, **SHAPE)
    found = tmp_path / "embedding.npy"
    grown = growth_bytes(bundle, backend, precision, long_text.file, found)
    assert_same_directions(np.load(found), long_text.embedding, cosine=cosine)
    assert grown < most_bytes, f"{grown / 1e9:.2f} GB beside the loaded session"


@needs_openvino
@pytest.mark.nightly
def test_a_small_model_keeps_no_float_for_each_query_and_key(
    openvino_bundles: Callable[..., Any], tmp_path: Path
) -> None:
    """Small models run with dynamic shapes in OpenVINO, which keeps masks of several layers: 1.8 bytes for each query
    and key. A float for each, or a head's scores, would be 4."""
    bundle = openvino_bundles("qwen3", "sentence-similarity", max_len=TOKENS, num_hidden_layers=4)
    ids = text_of_parts(TOKENS // 2)
    np.save(tmp_path / "ids.npy", ids)
    grown = growth_bytes(bundle, "openvino", "float32", tmp_path / "ids.npy", tmp_path / "embedding.npy")
    pairs = ids.size**2
    assert grown < 2 * pairs, f"{grown / pairs:.2f} bytes for each query and key"


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
