"""The CPU lowering of block-sparse attention: by the definition on both sides of every choice, in linear memory."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto

from hdexport.graph.lowering.onnxruntime_cpu import lower_for_onnxruntime_cpu
from support.attention_graphs import (
    STATES,
    Blocks,
    Dense,
    answer_by_definition,
    insert_after,
    portable_graph,
    states_of,
)
from support.comparators import assert_close
from support.function_bodies import growth_bytes

BIGBIRD = Blocks(repeats=2, dense=72)
LAYERS = {
    BIGBIRD: 72,
    replace(BIGBIRD, by_row=1): 72,
    Blocks(listed=(2, 9, 2), dense=40): 40,
    Blocks(first=2, last=0): 32,
    Blocks(first=0, last=0, window=-1, listed=(1, 9, 3)): 0,
    Blocks(block=5, first=1, last=1, window=-1, repeats=1): 10,
    Blocks(block=5, first=0, last=1, window=2): 20,
}
"""Layer -> the longest text whose queries see all keys, each once."""
PADDINGS = ("none", "right", "left", "holes", "all")

ATOL = 6e-6
"""Measured 2.7e-6; values reach 5.2."""


def mask_of(padding: str, tokens: int, *, batch: int = 3) -> np.ndarray:
    """[batch, tokens], int32; the first text has the padding."""
    mask = np.ones((batch, tokens), np.int32)
    if padding == "right":
        mask[0, (tokens + 1) // 2 :] = 0
    elif padding == "left":
        mask[0, : tokens // 2] = 0
    elif padding == "holes":
        mask[0] = np.random.default_rng(tokens).random(tokens) < 0.6
    elif padding == "all":
        mask[0] = 0
    return mask


def feeds_of(mask: np.ndarray, layers: tuple[Blocks | Dense, ...]) -> dict[str, np.ndarray]:
    feeds = states_of(*mask.shape) | {"token_mask": mask, "key_mask": mask != 0}
    names = {*STATES, *(name for layer in layers for name in layer.inputs)}
    return {name: feed for name, feed in feeds.items() if name in names}


def session_of(lowered: ir.Model) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(ir.serde.serialize_model(lowered).SerializeToString(), options)


@functools.cache
def lowered_session(*layers: Blocks | Dense) -> onnxruntime.InferenceSession:
    return session_of(lower_for_onnxruntime_cpu(portable_graph(*layers)))


def assert_right(session: onnxruntime.InferenceSession, mask: np.ndarray, *layers: Blocks | Dense) -> None:
    feeds = feeds_of(mask, layers)
    (got,) = session.run(None, feeds)
    assert_close(got, answer_by_definition(layers, feeds), atol=ATOL)
    assert (got[mask == 0] == 0).all()


def node_types(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.all_nodes())


@pytest.mark.parametrize(("layer", "longest"), LAYERS.items(), ids=str)
def test_lowered_blocks_match_the_definition_at_every_length(layer: Blocks, longest: int) -> None:
    session = lowered_session(layer)
    lengths = {1, 7, 8, 9, 16, 17, 97, longest - 1, longest, longest + 1} - {-1, 0}
    for number, tokens in enumerate(sorted(lengths)):
        for turn, padding in enumerate(("none", PADDINGS[1 + number % 4])):
            assert_right(session, mask_of(padding, tokens, batch=1 if (number + turn) % 3 == 0 else 3), layer)


@pytest.mark.parametrize(("layer", "longest"), [item for item in LAYERS.items() if item[1]], ids=str)
def test_all_keys_are_attended_to_exactly_where_nothing_is_hidden(layer: Blocks, longest: int) -> None:
    """The branch for it is made a wrong one; where the answer is right, the other was taken."""
    model = lower_for_onnxruntime_cpu(portable_graph(layer))
    (choice,) = (node for node in model.graph if node.op_type == "If")
    (fused,) = (node for node in choice.attributes["then_branch"].as_graph() if node.op_type == "MultiHeadAttention")
    fused.attributes["scale"] = ir.AttrFloat32("scale", -1.0)
    session = session_of(model)
    for tokens in (2, longest - 1, longest, longest + 1, 2 * longest):
        for padding in ("none", "left", "holes"):
            mask = mask_of(padding, tokens)
            feeds = feeds_of(mask, (layer,))
            (got,) = session.run(None, feeds)
            wrong = not np.allclose(got, answer_by_definition([layer], feeds), atol=0.1)
            assert wrong == (mask.all() and tokens <= longest), (tokens, padding)


def test_a_list_of_blocks_alone_never_sees_all_keys_once() -> None:
    lowered = lower_for_onnxruntime_cpu(portable_graph(Blocks(first=0, last=0, window=-1, listed=(1, 9, 3))))
    assert not {"If", "MultiHeadAttention"} & set(node_types(lowered))


def test_layers_that_differ_share_a_graph() -> None:
    layers = (BIGBIRD, Dense(), *list(LAYERS)[2:5], Blocks(listed=(1, 5, 3), dense=40), BIGBIRD)
    for tokens, padding in ((8, "none"), (40, "none"), (97, "none"), (97, "holes")):
        assert_right(lowered_session(*layers), mask_of(padding, tokens), *layers)


def test_a_graph_holds_one_body_for_layers_alike_and_asks_about_the_text_once() -> None:
    lowered = lower_for_onnxruntime_cpu(portable_graph(BIGBIRD, BIGBIRD, replace(BIGBIRD, block=16)))
    counts = node_types(lowered)
    assert len(lowered.functions) == 1
    assert counts["If"] == counts["MultiHeadAttention"] == 3
    assert counts["ReduceMin"] == 1
    (body,) = lowered.functions.values()
    assert sum(node.op_type == "Scan" for node in body.graph.all_nodes()) == 2


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_a_half_precision_graph_is_computed_in_float32(dtype: int) -> None:
    layers = (BIGBIRD, Blocks(listed=(2, 9, 2)))
    session = session_of(lower_for_onnxruntime_cpu(portable_graph(*layers, dtype=dtype)))
    for tokens in (17, 97):
        assert_right(session, mask_of("none", tokens), *layers)


@pytest.mark.parametrize("changed", [*STATES, "attended"])
def test_what_changes_between_splitting_attention_and_merging_stays(changed: str) -> None:
    model = portable_graph(BIGBIRD)
    (node,) = (node for node in model.graph if node.op_type == BIGBIRD.name)
    insert_after(node.outputs[0] if changed == "attended" else node.inputs[STATES.index(changed)], "Sin")
    session = session_of(lower_for_onnxruntime_cpu(model))
    for tokens in (17, 97):
        feeds = feeds_of(mask_of("none", tokens), (BIGBIRD,))
        exact = {name: np.sin(feed.astype(np.float64)) if name == changed else feed for name, feed in feeds.items()}
        expected = answer_by_definition([BIGBIRD], exact)
        (got,) = session.run(None, feeds)
        assert_close(got, np.sin(expected) if changed == "attended" else expected, atol=ATOL)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc, which Linux has")
def test_memory_is_linear_in_tokens_and_of_the_batch_grows_what_comes_out(tmp_path: Path) -> None:
    path = tmp_path / "lowered.onnx"
    layers = (Blocks(block=64, repeats=3, dense=300), Blocks(block=64, listed=(2, 254, 3)))
    ir.save(lower_for_onnxruntime_cpu(portable_graph(*layers)), path)
    result_bytes = 8192 * 64 * 4
    short, long = growth_bytes(path, tokens=8192), growth_bytes(path, tokens=16384)
    assert short > result_bytes, "less than the result: nothing was measured"
    assert long <= 2.2 * short
    assert growth_bytes(path, tokens=512, batch=16) <= 1.2 * short
