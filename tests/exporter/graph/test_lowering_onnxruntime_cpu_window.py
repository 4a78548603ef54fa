"""The CPU lowering of sliding windows: by the definition on both sides of every choice it makes, in linear memory."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto

from hdexport.graph.lowering.onnxruntime_cpu import lower_for_onnxruntime_cpu
from support.attention_graphs import (
    STATES,
    Dense,
    Window,
    answer_by_definition,
    insert_after,
    portable_graph,
    states_of,
)
from support.comparators import assert_close
from support.function_bodies import growth_bytes

LAYERS = (
    Window(left=16, right=16),
    Window(left=16, right=16, bound=5),
    Window(left=16, right=7, bound=40),
    Window(left=0, right=16),
    Window(left=16, right=16, dilation=(1, 1), bound=5),
    Window(left=16, right=16, dilation=(1, 3), bound=5),
    Window(left=5000, right=5000, bound=3),
)
LENGTHS = (1, 7, 8, 9, 15, 16, 17, 18, 32, 33, 97, 211)
PADDINGS = ("none", "right", "left", "holes", "all")
GLOBALS = ("none", "first", "scattered", "as many as fit")

ATOL = 8e-6
"""Measured 5.9e-6; values reach 5.7."""


def kinds_of(globals_: str, padding: str, tokens: int, *, bound: int, batch: int = 3) -> np.ndarray:
    """[batch, tokens], int32; the first text has the padding, all have the globals."""
    generator = np.random.default_rng(tokens)
    kinds = np.ones((batch, tokens), np.int32)
    if padding == "right":
        kinds[0, (tokens + 1) // 2 :] = 0
    elif padding == "left":
        kinds[0, : tokens // 2] = 0
    elif padding == "holes":
        kinds[0] = generator.random(tokens) < 0.6
    elif padding == "all":
        kinds[0] = 0
    for number, row in enumerate(kinds):
        (real,) = row.nonzero()
        if globals_ == "first":
            row[real[: min(1, bound)]] = 2
        elif globals_ == "scattered":
            row[generator.permutation(real)[: max(bound - number, 0)]] = 2
        elif globals_ == "as many as fit":
            row[real[:bound]] = 2
    return kinds


def feeds_of(kinds: np.ndarray, layers: tuple[Dense | Window, ...]) -> dict[str, np.ndarray]:
    feeds = states_of(*kinds.shape) | {"token_kind": kinds, "key_mask": kinds != 0}
    names = {*STATES, *(name for layer in layers for name in layer.inputs)}
    return {name: feed for name, feed in feeds.items() if name in names}


def session_of(lowered: ir.Model) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(ir.serde.serialize_model(lowered).SerializeToString(), options)


@functools.cache
def lowered_session(*layers: Dense | Window) -> onnxruntime.InferenceSession:
    return session_of(lower_for_onnxruntime_cpu(portable_graph(*layers)))


def assert_right(session: onnxruntime.InferenceSession, kinds: np.ndarray, *layers: Dense | Window) -> None:
    feeds = feeds_of(kinds, layers)
    (got,) = session.run(None, feeds)
    assert_close(got, answer_by_definition(layers, feeds), atol=ATOL)
    assert (got[kinds == 0] == 0).all()


def node_types(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.all_nodes())


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_lowered_windows_match_the_definition_at_every_length(layer: Window) -> None:
    """Globals and padding take turns, so that each length meets several pairs of them."""
    session = lowered_session(layer)
    for number, tokens in enumerate(LENGTHS):
        for turn, padding in enumerate(("none", *PADDINGS[1 + number % 4 :][:2])):
            globals_ = GLOBALS[(number + turn) % 4]
            batch = 1 if (number + turn) % 3 == 0 else 3
            assert_right(session, kinds_of(globals_, padding, tokens, bound=layer.bound, batch=batch), layer)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("globals_", GLOBALS)
def test_globals_and_padding_mix(globals_: str, padding: str) -> None:
    for tokens in (9, 97):
        assert_right(lowered_session(LAYERS[2]), kinds_of(globals_, padding, tokens, bound=40), LAYERS[2])


@pytest.mark.parametrize(("tokens", "batch"), [(1000, 2), (4096, 1)])
def test_lowered_windows_match_the_definition_on_long_texts(tokens: int, batch: int) -> None:
    layer = Window(left=256, right=256, bound=16)
    assert_right(lowered_session(layer), kinds_of("scattered", "right", tokens, bound=16, batch=batch), layer)


@pytest.mark.parametrize("layer", [LAYERS[0], LAYERS[2], LAYERS[3], LAYERS[4]], ids=str)
def test_all_keys_are_attended_to_exactly_where_nothing_is_hidden(layer: Window) -> None:
    """The branch for it is made a wrong one; where the answer is right, the other was taken."""
    model = lower_for_onnxruntime_cpu(portable_graph(layer))
    (choice,) = (node for node in model.graph if node.op_type == "If")
    (fused,) = (node for node in choice.attributes["then_branch"].as_graph() if node.op_type == "MultiHeadAttention")
    fused.attributes["scale"] = ir.AttrFloat32("scale", -1.0)
    session = session_of(model)
    reach = min(layer.left, layer.right)
    for tokens in {1, 2, reach, reach + 1, reach + 2, 2 * reach + 2} - {0}:
        for padding in PADDINGS:
            kinds = kinds_of("first", padding, tokens, bound=layer.bound)
            feeds = feeds_of(kinds, (layer,))
            (got,) = session.run(None, feeds)
            exact = answer_by_definition([layer], feeds)
            # Of one key, any softmax is 1.
            wrong = not np.allclose(got, exact, atol=0.1)
            assert wrong == (kinds.all() and 1 < tokens <= reach + 1), (tokens, padding)


def test_a_dilated_window_never_sees_all_keys() -> None:
    lowered = lower_for_onnxruntime_cpu(portable_graph(LAYERS[5]))
    assert not {"If", "MultiHeadAttention"} & set(node_types(lowered))


def test_layers_that_differ_share_a_graph() -> None:
    """Windows, dilations and bounds of their own, dense attention among them, several branches taken."""
    layers = (LAYERS[1], Dense(), Window(left=64, right=64, bound=9), LAYERS[5], LAYERS[2], LAYERS[1])
    for tokens, padding in ((8, "none"), (40, "none"), (97, "none"), (97, "holes")):
        assert_right(lowered_session(*layers), kinds_of("scattered", padding, tokens, bound=5), *layers)


def test_a_graph_holds_one_body_for_layers_alike_and_asks_about_the_text_once() -> None:
    lowered = lower_for_onnxruntime_cpu(portable_graph(LAYERS[0], LAYERS[1], LAYERS[1], LAYERS[5]))
    counts = node_types(lowered)
    assert len(lowered.functions) == 3
    assert counts["If"] == counts["MultiHeadAttention"] == 3
    assert counts["ReduceMin"] == 1
    bodies = [function.graph.all_nodes() for function in lowered.functions.values()]
    assert [sum(node.op_type == "Scan" for node in nodes) for nodes in bodies] == [1, 1, 2]


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_a_half_precision_graph_is_computed_in_float32(dtype: int) -> None:
    session = session_of(lower_for_onnxruntime_cpu(portable_graph(LAYERS[1], LAYERS[5], dtype=dtype)))
    for tokens in (17, 97):
        assert_right(session, kinds_of("scattered", "none", tokens, bound=5), LAYERS[1], LAYERS[5])


@pytest.mark.parametrize("changed", [*STATES, "attended"])
def test_what_changes_between_splitting_attention_and_merging_stays(changed: str) -> None:
    """As rotary positions do, and the rows of global tokens."""
    layer = LAYERS[1]
    model = portable_graph(layer)
    (node,) = (node for node in model.graph if node.op_type == layer.name)
    insert_after(node.outputs[0] if changed == "attended" else node.inputs[STATES.index(changed)], "Sin")
    session = session_of(lower_for_onnxruntime_cpu(model))
    for tokens in (17, 37):
        feeds = feeds_of(kinds_of("scattered", "none", tokens, bound=5), (layer,))
        exact = {name: np.sin(feed.astype(np.float64)) if name == changed else feed for name, feed in feeds.items()}
        expected = answer_by_definition([layer], exact)
        (got,) = session.run(None, feeds)
        assert_close(got, np.sin(expected) if changed == "attended" else expected, atol=ATOL)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc, which Linux has")
def test_memory_is_linear_in_tokens_and_of_the_batch_grows_what_comes_out(tmp_path: Path) -> None:
    layers = Window(left=256, right=256, bound=16), Window(left=64, right=64)
    path = tmp_path / "model.onnx"
    ir.save(lower_for_onnxruntime_cpu(portable_graph(*layers)), path)
    short, long, many = (
        growth_bytes(path, tokens=tokens, batch=batch) for batch, tokens in ((1, 4096), (1, 8192), (8, 512))
    )
    assert short > 4096 * 64 * 4, "less than the result: nothing was measured"
    assert long <= 2.2 * short
    assert many <= 1.2 * short
