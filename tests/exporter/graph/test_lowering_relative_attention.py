"""Relative attention as ONNX Runtime computes it on a CPU: one head of one text after another, in float32."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper

from hdexport.graph.targets.onnxruntime.cpu import lower_for_onnxruntime_cpu
from support.attention_graphs import chain_of, session_of
from support.attention_layers import PADDINGS
from support.comparators import assert_close, named_case
from support.exact_answers import exact_answer
from support.function_bodies import growth_bytes, growths_bytes
from support.operators.relative import Relative, inputs_of, key_kinds

NODES = (Relative(), Relative(segments=False, heads=3), Relative(causal=1, reach=9))
ATOL = 1.2e-5
"""Measured 5.4e-6; values reach 6.2."""


def portable_graph(*nodes: Relative) -> ir.Model:
    """Nodes in a chain, between casts, as in a model. Inputs and result are float32; the result is negated."""
    model = chain_of(nodes)
    graph, (output,) = model.graph, model.graph.output
    casts, names = [], {}
    for value in graph.input:
        if value.name == "key_kind":
            continue
        names[value.name] = f"{value.name}_typed"
        inner = graph.value_info.add()
        inner.CopyFrom(value)
        inner.name = names[value.name]
        tensor_type = value.type.tensor_type
        casts.append(helper.make_node("Cast", [value.name], [inner.name], to=tensor_type.elem_type))
        tensor_type.elem_type = TensorProto.FLOAT
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    graph.value_info.add().CopyFrom(output)
    results = [
        helper.make_node("Cast", [output.name], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Neg", ["wide"], ["result"]),
    ]
    output.name, output.type.tensor_type.elem_type = "result", TensorProto.FLOAT
    body = [*casts, *graph.node, *results]
    del graph.node[:]
    graph.node.extend(body)
    return ir.serde.deserialize_model(model)


@functools.cache
def lowered_session(*nodes: Relative) -> onnxruntime.InferenceSession:
    return session_of(lower_for_onnxruntime_cpu(portable_graph(*nodes)))


def assert_right(inputs: Mapping[str, np.ndarray], *nodes: Relative) -> None:
    (got,) = lowered_session(*nodes).run(None, dict(inputs))
    exact = {name: array if name == "key_kind" else array.astype(np.float64) for name, array in inputs.items()}
    for node in nodes:
        exact["query"] = exact_answer(node, exact)
    assert_close(got, -exact["query"], atol=ATOL)
    assert (got[inputs["key_kind"][:, -got.shape[1] :] == 0] == 0).all()


@pytest.mark.parametrize("node", NODES, ids=str)
def test_lowered_attention_matches_the_definition_at_every_length(node: Relative) -> None:
    paddings, batches = itertools.cycle(PADDINGS), itertools.cycle((3, 1, 3))
    for tokens, memory in itertools.product((1, 5, 127, 128, 129, 257), (0, 1, 7, 512)):
        padding, batch = next(paddings), next(batches)
        with named_case(tokens, memory, padding, batch):
            assert_right(inputs_of(node, key_kinds(padding, tokens, memory, batch=batch), tokens), node)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_half_precision_graph_is_computed_in_float32(dtype: str) -> None:
    node = Relative(dtype=dtype)
    portable = portable_graph(node)
    lowered = lower_for_onnxruntime_cpu(portable.clone())
    half = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    assert not [value for inner in lowered.graph.all_nodes() for value in inner.outputs if value.dtype in half]
    inputs = inputs_of(Relative(), key_kinds("right", 131, 7), 131)
    (got,) = session_of(lowered).run(None, dict(inputs))
    assert_close(got, -exact_answer(Relative(), inputs), atol=ATOL)


def test_layers_that_differ_share_a_graph_that_swaps_nothing() -> None:
    """States are read as projections leave them; one body for layers alike."""
    nodes = (Relative(), replace(Relative(), reach=70), Relative())
    lowered = lower_for_onnxruntime_cpu(portable_graph(*nodes))
    assert Counter(node.op_type for node in lowered.graph)["Transpose"] == 0
    assert len(lowered.functions) == 2
    assert_right(inputs_of(nodes[0], key_kinds("right", 131, 40), 131), *nodes)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc, which Linux has")
def test_memory_is_linear_in_tokens_and_of_the_batch_grows_what_comes_in_and_out(tmp_path: Path) -> None:
    """The scores of a head of 4096 tokens that see 4608 keys take 75 MB, the states 3.4 MB."""
    path = tmp_path / "model.onnx"
    ir.save(lower_for_onnxruntime_cpu(portable_graph(Relative(heads=4))), path)
    short, long = growths_bytes(path, 2048, 4096, memory=512)
    assert short > 2048 * 4 * 32 * 4, "less than the result: nothing was measured"
    assert long <= 2.2 * short
    assert growth_bytes(path, tokens=512, batch=8, memory=512) <= 1.5 * short
