"""Feed-forward networks in chunks of tokens: the same answers in less memory, and what is no network is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_ir.passes.common import ShapeInferencePass

from hdexport.families import SUPPORTED_MODEL_TYPES
from hdexport.graph.passes.chunk_feed_forward import ChunkFeedForward
from hdexport.graph.targets.onnxruntime.cpu import lower_for_onnxruntime_cpu
from hdruntime.errors import ExportError
from support.answers import inputs_of
from support.comparators import assert_close, named_case
from support.function_bodies import growth_bytes
from support.grids import nightly_unless
from support.tiny_models import COPIES, PAD_TOKEN_ID, VOCAB_SIZE

CHUNK = 48
SHAPES = [(batch, tokens) for batch in (1, 3) for tokens in (1, 16, 17, 47, 48, 49, 95, 96, 97, 200)]
"""Batches of one token less than a number of chunks, of as many and of one more."""

DIFFERENT = ("albert", "bert", "longformer", "modernbert", "reformer", "t5")
"""Layers with shared weights, plain and longer ones, networks gated in two ways, and those after a normalisation."""

ATOL = 1e-5
"""Three times the largest difference measured, 2.9e-6: ONNX Runtime adds the bias within the product in a loop only."""

Run = Callable[[dict[str, np.ndarray]], list[np.ndarray]]


def run_of(model: ir.Model | Path, folder: Path | None = None) -> Run:
    """A session on the CPU; weights outside of the graph are in the folder."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    content = str(model) if isinstance(model, Path) else ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(content, options)
    return lambda feeds: session.run(None, feeds)


def loops_of(model: ir.Model) -> int:
    return sum(node.op_type == "Scan" for node in model.graph.all_nodes())


# Models


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *(nightly_unless(name in DIFFERENT, name, {}) for name in SUPPORTED_MODEL_TYPES if name not in COPIES),
        ("bert", {"precision": "float16"}),
        ("mpnet", {"precision": "bfloat16"}),
        pytest.param("t5", {"precision": "float16"}, marks=pytest.mark.nightly),
        ("bert", {"task": "fill-mask"}),
    ],
)
def test_chunks_do_not_change_answers(tiny_bundles, model_type: str, changes: dict[str, str]) -> None:
    bundle = tiny_bundles(model_type, **changes)
    model = ir.load(bundle.path / "model.onnx")
    layers = bundle.manifest.num_layers
    adapters = layers if model_type == "xmod" else 0
    assert ChunkFeedForward(CHUNK, layers=layers)(model).modified
    assert sum(node.op_type == "Scan" for node in model.graph) == layers + adapters
    assert len(model.graph.initializers) == len(bundle.graph.graph.initializers), "no weight is copied"
    inside = {value.name for body in model.graph.subgraphs() for node in body for value in node.outputs}
    assert all(name.startswith("feed_forward_") for name in inside), "other passes use no such names"
    chunked = run_of(lower_for_onnxruntime_cpu(model), bundle.path)
    whole = run_of(bundle.path / "onnxruntime_cpu.onnx")
    generator = np.random.default_rng(0)
    for batch, tokens in SHAPES:
        input_ids = generator.integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (batch, tokens))
        mask = np.ones_like(input_ids)
        mask[1:, 3 * tokens // 4 + 1 :] = 0
        feeds = inputs_of(bundle, input_ids, mask)
        for got, expected in zip(chunked(feeds), whole(feeds), strict=True):
            assert_close(got, expected, atol=ATOL)


@pytest.fixture
def bundle(tiny_bundles: Any) -> Any:
    return tiny_bundles("bert", attention="window:16", ffn_chunk=CHUNK)


def test_graphs_for_onnxruntime_have_loops_and_the_portable_one_has_none(bundle: Any) -> None:
    assert bundle.manifest.ffn_chunk == CHUNK
    loops = {graph.lowering: loops_of(ir.load(bundle.path / graph.file)) for graph in bundle.manifest.graphs}
    layers = bundle.manifest.num_layers
    # Windows are not fused on a GPU, so that without chunks there would be no graph for it.
    assert loops == {"portable": 0, "onnxruntime_cpu": layers, "onnxruntime_cuda": layers}


def test_the_graph_for_gpus_gives_the_portable_answers(bundle: Any) -> None:
    input_ids = np.random.default_rng(0).integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (3, 65))
    feeds = inputs_of(bundle, input_ids, np.ones_like(input_ids))
    (got,) = run_of(bundle.path / "onnxruntime_cuda.onnx")(feeds)
    assert_close(got, bundle.portable(**feeds)["last_hidden_state"], atol=ATOL)


# Networks


LAYERS: dict[str, str] = {
    "relu": "a = MatMul(x, up) b = Add(a, wide) c = Relu(b) d = MatMul(c, down) y = Add(d, narrow)",
    "gelu of an error function, bias first, no second bias": (
        "a = MatMul(x, up) b = Add(wide, a) s = Div(b, scale) e = Erf(s) f = Add(e, scale) c = Mul(b, f) "
        "y = MatMul(c, down)"
    ),
    "after a normalisation": (
        "n = LayerNormalization(x, narrow, narrow) a = MatMul(n, up) c = Tanh(a) d = MatMul(c, down) y = Add(d, narrow)"
    ),
    "gated by halves": (
        "a = MatMul(x, up) l, r = Split <axis = -1, num_outputs = 2> (a) g = Gelu(l) c = Mul(g, r) y = MatMul(c, half)"
    ),
    "gated by another layer": (
        "a = MatMul(x, up) b = MatMul(x, gate) s = Sigmoid(a) t = Mul(a, s) c = Mul(t, b) y = MatMul(c, down)"
    ),
}
"""Nodes from x, [batch, tokens, 6], to y of the same shape; ``up`` and ``gate`` are [6, 8], ``down`` [8, 6]."""


def network_of(nodes: str, *, hidden: int = 6, width: int = 8) -> ir.Model:
    generator = np.random.default_rng(1)
    shapes = {
        "up": (hidden, width),
        "gate": (hidden, width),
        "down": (width, hidden),
        "half": (width // 2, hidden),
        "other": (width, hidden // 2),
        "wide": (width,),
        "narrow": (hidden,),
        "scale": (),
    }
    weights = {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items() if name in nodes}
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
        network (float[batch, tokens, {hidden}] x) => (float[batch, tokens, {hidden}] y) {{ {nodes} }}"""
    model = ir.from_onnx_text(text, initializers=[ir.tensor(value, name=name) for name, value in weights.items()])
    return ShapeInferencePass()(model).model


@pytest.mark.parametrize("layer", LAYERS)
def test_networks_of_every_form_are_taken(layer: str) -> None:
    right = run_of(network_of(LAYERS[layer]))
    for tokens in (1, 4):
        chunked = network_of(LAYERS[layer])
        assert ChunkFeedForward(tokens, layers=1)(chunked).modified
        assert {"MatMul", "Relu", "Gelu", "Mul"} & {node.op_type for node in chunked.graph} <= {"Mul"}, "of sizes"
        got = run_of(chunked)
        for batch, length in ((1, 1), (1, 4), (1, 5), (2, 4), (3, 7)):
            x = np.random.default_rng(2).standard_normal((batch, length, 6), np.float32)
            with named_case(f"chunks of {tokens}", batch, length):
                assert_close(got({"x": x})[0], right({"x": x})[0], atol=ATOL)


REFUSED: dict[str, tuple[str, str]] = {
    "tokens are mixed": (
        "a = MatMul(x, up) b = Relu(a) one = Constant <value_int = 1> () c = CumSum(b, one) y = MatMul(c, down)",
        "MatMul of down ends none, because CumSum is before it",
    ),
    "tokens are taken apart": (
        "a = MatMul(x, up) l, r = Split <axis = 1, num_outputs = 2> (a) c = Relu(l) d = MatMul(c, down) "
        "e = Relu(r) f = MatMul(e, down) y = Concat <axis = 1> (d, f)",
        "because Split is before it",
    ),
    "no activation": ("a = MatMul(x, up) b = Add(a, wide) y = MatMul(b, down)", "because there is no activation"),
    "wide values are read elsewhere": (
        "a = MatMul(x, up) b = Relu(a) d = MatMul(b, down) m = ReduceMax(a) y = Add(d, m)",
        "because something else reads a",
    ),
    "two inputs": (
        "n = Neg(x) a = MatMul(x, up) b = MatMul(n, gate) s = Sigmoid(a) c = Mul(s, b) y = MatMul(c, down)",
        "because 2 values enter the linear layers before it",
    ),
    "another width": (
        "a = MatMul(x, up) b = Relu(a) c = Mul(b, wide) d = MatMul(c, other) e = ReduceMax(d) y = Add(x, e)",
        r"because it makes \[batch,tokens,3\] of \[batch,tokens,6\]",
    ),
    "no linear layer": ("y = Relu(x)", "The nearest miss: there is no linear layer"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_is_no_network_stops_the_export_and_is_named(wrong: str) -> None:
    nodes, reason = REFUSED[wrong]
    model = network_of(nodes)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    with pytest.raises(ExportError, match=rf"(?s)ffn_chunk found 0 .* in 1 layers.*{reason}.*Build without"):
        ChunkFeedForward(4, layers=1)(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_fewer_networks_than_layers_are_refused() -> None:
    with pytest.raises(ExportError, match=r"found 1 feed-forward networks in 2 layers"):
        ChunkFeedForward(4, layers=2)(network_of(LAYERS["relu"]))


def test_memory_grows_with_a_chunk_and_not_with_the_text(tmp_path: Path) -> None:
    tokens, hidden, width = 16384, 16, 1024
    growth = {}
    for chunk in (tokens, 512):
        model = network_of(LAYERS["relu"], hidden=hidden, width=width)
        ChunkFeedForward(chunk, layers=1)(model)
        path = tmp_path / f"{chunk}.onnx"
        ir.save(model, path)
        growth[chunk] = growth_bytes(path, tokens=tokens)
    values = 4 * tokens * hidden
    assert growth[tokens] > 4 * tokens * width, "the activation's, at least"
    assert growth[512] < 2 * 4 * 512 * width + 8 * values + 10e6
