"""The CPU lowering: fused attention that answers by the definition, for all masks, heads and lengths."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from comparators import assert_close
from hdexport.lowering.onnxruntime_cpu import lower_for_onnxruntime_cpu
from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION, ONNX_OPSET
from hdplugins.dense_attention.onnx_function import function_of_arity
from hdplugins.dense_attention.reference import dense_attention
from hdruntime.errors import ExportError

HEADS = 2
BATCH = 3
MASKS = ("full", "right", "left", "scattered", "all padding")
STATES = ("query", "key", "value")


def key_mask_of(kind: str, tokens: int) -> np.ndarray:
    """[batch, tokens], bool; row 0 has the padding, the others have none."""
    mask = np.ones((BATCH, tokens), bool)
    if kind == "right":
        mask[0, (tokens + 1) // 2 :] = False
    elif kind == "left":
        mask[0, : tokens // 2] = False
    elif kind == "scattered":
        mask[0] = np.random.default_rng(tokens).random(tokens) < 0.5
        mask[0, tokens // 2] = True
    elif kind == "all padding":
        mask[0] = False
    return mask


def portable(*, head_dim: int = 32, bias: bool = False, nodes: int = 1, dtype: int = TensorProto.FLOAT) -> ir.Model:
    """Attentions between the splitting and merging of heads, each taking its query from the one before."""
    hidden, split = ["batch", "tokens", HEADS * head_dim], ["batch", HEADS, "tokens", head_dim]
    inputs = [helper.make_tensor_value_info(name, dtype, hidden) for name in STATES]
    inputs.append(helper.make_tensor_value_info("key_mask", TensorProto.BOOL, ["batch", "tokens"]))
    if bias:
        inputs.append(helper.make_tensor_value_info("bias", dtype, ["bias_batch", HEADS, "tokens", "tokens"]))
    body, values = [], []
    current = "query"
    for number in range(nodes):
        parts = []
        for state, source in zip(STATES, (current, "key", "value"), strict=True):
            name = f"{state}_{number}"
            body.append(helper.make_node("Reshape", [source, "to_heads"], [f"{name}_heads"]))
            body.append(helper.make_node("Transpose", [f"{name}_heads"], [name], perm=[0, 2, 1, 3]))
            values.append(helper.make_tensor_value_info(name, dtype, split))
            parts.append(name)
        parts += ["key_mask", *(["bias"] if bias else [])]
        attended = f"attended_{number}"
        body.append(helper.make_node("DenseAttention", parts, [attended], domain=ONNX_DOMAIN, scale=head_dim**-0.5))
        body.append(helper.make_node("Transpose", [attended], [f"{attended}_turned"], perm=[0, 2, 1, 3]))
        current = f"merged_{number}"
        body.append(helper.make_node("Reshape", [f"{attended}_turned", "to_hidden"], [current]))
        values.append(helper.make_tensor_value_info(attended, dtype, split))
        values.append(helper.make_tensor_value_info(current, dtype, hidden))
    # As in a model, where a projection follows.
    body.append(helper.make_node("Neg", [current], ["result"]))
    constants = {"to_heads": [0, 0, HEADS, head_dim], "to_hidden": [0, 0, HEADS * head_dim]}
    graph = helper.make_graph(
        body,
        "attention",
        inputs,
        [helper.make_tensor_value_info("result", dtype, hidden)],
        [helper.make_tensor(name, TensorProto.INT64, [len(shape)], shape) for name, shape in constants.items()],
        value_info=values,
    )
    opsets = [helper.make_opsetid("", ONNX_OPSET), helper.make_opsetid(ONNX_DOMAIN, ONNX_DOMAIN_VERSION)]
    functions = [function_of_arity(5 if bias else 4)]
    return ir.serde.deserialize_model(
        helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)
    )


@functools.cache
def lowered_session(head_dim: int, *, bias: bool) -> onnxruntime.InferenceSession:
    lowered = lower_for_onnxruntime_cpu(portable(head_dim=head_dim, bias=bias))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(ir.serde.serialize_model(lowered).SerializeToString(), options)


def split_heads(states: np.ndarray) -> torch.Tensor:
    """[batch, tokens, hidden] -> [batch, heads, tokens, head_dim], float64."""
    return torch.from_numpy(states).double().unflatten(-1, (HEADS, -1)).transpose(1, 2)


@pytest.mark.parametrize("bias_batch", [None, 1, BATCH], ids=["no bias", "shared bias", "a bias a row"])
@pytest.mark.parametrize("head_dim", [8, 32, 64])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127])
def test_lowered_attention_matches_the_definition(
    tokens: int, mask: str, head_dim: int, bias_batch: int | None
) -> None:
    generator = np.random.default_rng(tokens * head_dim)
    feeds = {name: generator.normal(size=(BATCH, tokens, HEADS * head_dim)).astype(np.float32) for name in STATES}
    feeds["key_mask"] = key_mask_of(mask, tokens)
    bias = None
    if bias_batch is not None:
        feeds["bias"] = generator.normal(size=(bias_batch, HEADS, tokens, tokens)).astype(np.float32)
        bias = torch.from_numpy(feeds["bias"]).double()
    (got,) = lowered_session(head_dim, bias=bias is not None).run(None, feeds)
    states = (split_heads(feeds[name]) for name in STATES)
    exact = dense_attention(*states, torch.from_numpy(feeds["key_mask"]), bias, scale=head_dim**-0.5)
    # Measured 1.6e-6; values reach 4.
    assert_close(-got, exact.transpose(1, 2).flatten(2).numpy(), atol=5e-6)
    if mask == "all padding":
        assert (got[0] == 0).all()


def test_every_attention_is_fused_and_looks_at_one_mask() -> None:
    lowered = lower_for_onnxruntime_cpu(portable(nodes=3))
    operators = [node.op_type for node in lowered.graph.all_nodes()]
    assert operators.count("If") == 3
    assert operators.count("MultiHeadAttention") == 6
    assert operators.count("ReduceMin") == 1
    assert not {"DenseAttention", "Transpose", "Reshape", "Softmax"} & set(operators)
    assert not lowered.functions


def test_without_padding_no_mask_is_read() -> None:
    """The form without a mask is the one whose memory is linear in tokens."""
    lowered = lower_for_onnxruntime_cpu(portable())
    (choice,) = (node for node in lowered.graph if node.op_type == "If")
    (free,) = (node for node in choice.attributes["then_branch"].as_graph() if node.op_type == "MultiHeadAttention")
    assert [value.name for value in free.inputs if value is not None] == list(STATES)
    masked = next(iter(choice.attributes["else_branch"].as_graph()))
    assert masked.inputs[4] is not None


def test_memory_without_padding_is_linear_in_tokens() -> None:
    """8192 tokens: the scores of a head would take 256 MiB, the states take 2 MiB."""
    code = (
        "import resource, numpy as np\n"
        "from test_lowering_onnxruntime_cpu import STATES, lowered_session\n"
        "session = lowered_session(32, bias=False)\n"
        "run = lambda tokens: session.run(None, {name: np.ones((1, tokens, 64), np.float32) for name in STATES}\n"
        "    | {'key_mask': np.ones((1, tokens), bool)})\n"
        "run(64)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "run(8192)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    grown_kib = int(done.stdout)
    assert grown_kib < 64 * 1024, f"{grown_kib} KiB"


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_a_half_precision_graph_is_widened(dtype: int) -> None:
    lowered = lower_for_onnxruntime_cpu(portable(dtype=dtype))
    half = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    assert not [value for node in lowered.graph.all_nodes() for value in node.outputs if value.dtype in half]


@pytest.mark.parametrize("change", ["query", "output", "perm"])
def test_an_attention_in_other_surroundings_stops_the_lowering_and_says_what_was_found(change: str) -> None:
    model = portable()
    node = next(node for node in model.graph if node.op_type == "DenseAttention")
    transpose = node.inputs[0].producer() if change != "output" else next(iter(node.outputs[0].uses())).node
    if change == "perm":
        transpose.attributes["perm"] = ir.AttrInt64s("perm", [0, 2, 3, 1])
    else:
        copied = ir.node("Identity", [transpose.inputs[0]])
        copied.outputs[0].shape, copied.outputs[0].dtype = transpose.outputs[0].shape, transpose.outputs[0].dtype
        model.graph.insert_before(transpose, copied)
        ir.convenience.replace_all_uses_with(transpose.outputs[0], copied.outputs[0])
    found = {"query": "input 0 comes from .*Identity", "output": "its output goes to .*Identity", "perm": "perm"}
    with pytest.raises(ExportError, match=rf"is not between a splitting(.|\n)*{found[change]}"):
        lower_for_onnxruntime_cpu(model)


def test_nothing_is_quadratic_in_a_real_graph(tiny_bundles) -> None:
    lowered = tiny_bundles("bert").cpu_graph
    operators = [node.op_type for node in lowered.graph.all_nodes()]
    assert operators.count("MultiHeadAttention") == 4
    assert "Softmax" not in operators
    assert operators.count("Gelu") == 2
    assert operators.count("LayerNormalization") == 5
