"""The TensorRT lowering: it computes what the operator's definition says, and builds into fused attention."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from hdexport.engines.tensorrt_packages import load_flavour
from hdexport.graph.lowering.plugin_nodes import plugin_nodes
from hdexport.graph.lowering.tensorrt import AttentionImpl, tensorrt_graph
from hdplugins.operators.dense_attention.reference import dense_attention
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import ExportError
from support.attention_graphs import HEADS, Dense, attention_model
from support.sparse_operators import PADDINGS, Window, token_kinds

_BUILT = {("float16", False), ("bfloat16", True)}
"""(dtype, whether there is a bias) that every run builds for each head size."""


_DENSE = Dense(dtype="float16")
_WINDOW = Window(left=16, right=16, bound=4, dtype="float16")


def _by_the_standard(model: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The result by ONNX's own definition of each operator."""
    proto = ir.serde.serialize_model(model)
    onnx.checker.check_model(proto)
    (result,) = ReferenceEvaluator(proto).run(None, feeds)
    return result


def _by_onnxruntime(model: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The result of ONNX Runtime, whose attention wants the row of the mask repeated for every query."""
    model = model.clone()
    for node in [node for node in model.graph if node.op_type == "Attention"]:
        sizes = ir.node("Shape", [node.inputs[0]], {"start": 2, "end": 3})
        ones = ir.node("Constant", [], {"value_ints": [1, 1]})
        one = ir.node("Constant", [], {"value_ints": [1]})
        shape = ir.node("Concat", [ones.outputs[0], sizes.outputs[0], one.outputs[0]], {"axis": 0})
        repeated = ir.node("Expand", [node.inputs[3], shape.outputs[0]])
        model.graph.insert_before(node, [sizes, ones, one, shape, repeated])
        node.replace_input_with(3, repeated.outputs[0])
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
    (result,) = session.run(None, feeds)
    return result


@pytest.mark.parametrize("bias_batch", [None, 1, 3], ids=["no bias", "shared bias", "a bias per sequence"])
@pytest.mark.parametrize("kind", PADDINGS)
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 257])
def test_lowered_attention_matches_the_definition(kind: str, tokens: int, bias_batch: int | None) -> None:
    generator = np.random.default_rng(tokens)
    shape = (3, HEADS, tokens, 32)
    feeds = {name: generator.normal(size=shape).astype(np.float16) for name in ("query", "key", "value")}
    feeds["key_mask"] = token_kinds(kind, tokens) != 0
    if bias_batch is not None:
        feeds["bias"] = generator.normal(size=(bias_batch, HEADS, tokens, tokens)).astype(np.float16)
    lowered = tensorrt_graph(attention_model(Dense(dtype="float16", bias=bias_batch is not None)), dtype="float16")
    exact = {name: torch.from_numpy(feed).double() for name, feed in feeds.items() if name != "key_mask"}
    expected = dense_attention(**exact, key_mask=torch.from_numpy(feeds["key_mask"]), scale=32**-0.5).numpy()
    for actual in (_by_the_standard(lowered, feeds), _by_onnxruntime(lowered, feeds)):
        assert np.isfinite(actual).all()
        # Measured 0.0028: weights and results are rounded to float16, as are scores of up to 8 (by 2**-9).
        assert np.abs(actual - expected).max() < 2**-8
        if kind == "all":
            assert (actual[0] == 0).all()


def test_content_of_padding_does_not_change_other_tokens() -> None:
    lowered = tensorrt_graph(attention_model(_DENSE), dtype="float16")
    generator = np.random.default_rng(0)
    feeds = {name: generator.normal(size=(2, HEADS, 65, 32)).astype(np.float16) for name in ("query", "key", "value")}
    feeds["key_mask"] = token_kinds("right", 65, batch=2) != 0
    before = _by_onnxruntime(lowered, feeds)
    feeds["value"][0, :, 40:] = np.inf
    feeds["key"][0, :, 40:] = 100
    after = _by_onnxruntime(lowered, feeds)
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_attentions_share_one_mask_and_no_body_is_left(dtype: str) -> None:
    lowered = tensorrt_graph(attention_model(*[Dense(dtype=dtype)] * 3), dtype=dtype)
    operators = [node.op_type for node in lowered.graph]
    assert operators.count("Attention") == 3
    assert operators.count("Unsqueeze") == 2
    assert not lowered.functions
    assert lowered.graph.opset_imports[""] == 23


@pytest.mark.parametrize("layers", [[_DENSE], [_WINDOW, _WINDOW]], ids=["dense", "windows"])
def test_the_portable_graph_is_left_as_it_is(layers: list[Dense | Window]) -> None:
    portable = attention_model(*layers)
    before = ir.serde.serialize_model(portable).SerializeToString(deterministic=True)
    tensorrt_graph(portable, dtype="float16")
    assert ir.serde.serialize_model(portable).SerializeToString(deterministic=True) == before


def test_float32_keeps_the_body_because_tensorrt_fuses_none() -> None:
    lowered = tensorrt_graph(attention_model(Dense()), dtype="float32")
    assert [node.op_type for node in lowered.graph] == ["DenseAttention"]
    assert ("hdexport", "DenseAttention", "") in lowered.functions


@pytest.mark.parametrize("head_dim", [8, 264])
def test_heads_without_a_kernel_keep_the_body_with_a_warning(head_dim: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        lowered = tensorrt_graph(attention_model(Dense(dtype="float16", head_dim=head_dim)), dtype="float16")
    assert [node.op_type for node in lowered.graph] == ["DenseAttention"]
    assert f"no fused attention for heads of {head_dim}" in caplog.text


def test_an_operator_that_changed_its_meaning_stops_the_lowering() -> None:
    model = attention_model(_DENSE)
    scale, shift = (ir.node("Constant", [], {"value": ir.tensor(np.ones(1, np.float16))}) for _ in range(2))
    norm = ir.node(
        "GroupNormalization",
        [model.graph.inputs[0], scale.outputs[0], shift.outputs[0]],
        {"num_groups": 1},
    )
    model.graph.extend([scale, shift, norm])
    with pytest.raises(ExportError, match="GroupNormalization"):
        tensorrt_graph(model, dtype="float16")


@pytest.mark.parametrize(
    ("head_dim", "bias", "dtype"),
    [
        # What is fused is decided by the head's size and by the dtype; a bias is one more input.
        pytest.param(
            head_dim, bias, dtype, marks=() if head_dim == 64 or (dtype, bias) in _BUILT else pytest.mark.nightly
        )
        for head_dim in (8, 12, 32, 64, 256, 264)
        for bias in (False, True)
        for dtype in ("float16", "bfloat16", "float32")
    ],
)
def test_lowered_attention_builds(head_dim: int, bias: bool, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_libs", reason="TensorRT-RTX builds engines without a GPU; not installed")
    # Through hdexport, or plugins would be out of reach for the tests that follow in this process.
    trt = load_flavour(Backend.TENSORRT_RTX)
    path = tmp_path / "lowered.onnx"
    ir.save(tensorrt_graph(attention_model(Dense(dtype=dtype, bias=bias, head_dim=head_dim)), dtype=dtype), path)
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
    assert parser.parse_from_file(str(path)), [parser.get_error(i).desc() for i in range(parser.num_errors)]
    kinds = {network.get_layer(index).type for index in range(network.num_layers)}
    config = builder.create_builder_config()
    for tokens in (96, 192):
        profile = builder.create_optimization_profile()
        for name in ("query", "key", "value"):
            profile.set_shape(name, (1, HEADS, 1, head_dim), (2, HEADS, tokens, head_dim), (8, HEADS, tokens, head_dim))
        profile.set_shape("key_mask", (1, 1), (2, tokens), (8, tokens))
        if bias:
            shapes = [(1, HEADS, 1, 1), *[(1, HEADS, tokens, tokens)] * 2]
            profile.set_shape("bias", *shapes)
        config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is not None
    fused = dtype != "float32" and head_dim not in (8, 264)
    assert (trt.LayerType.ATTENTION_INPUT in kinds) == fused


def test_windowed_attention_is_a_plugin_without_a_body() -> None:
    lowered = tensorrt_graph(attention_model(_WINDOW, _WINDOW, _DENSE), dtype="float16")
    ours = plugin_nodes(lowered)
    assert [node.op_type for node in ours] == ["SlidingWindowAttention"] * 2
    assert {node.attributes["plugin_namespace"].as_string() for node in ours} == {"hdexport"}
    assert {node.attributes["plugin_version"].as_string() for node in ours} == {"1"}
    assert ours[0].attributes["left"].as_int() == 16
    assert [node.op_type for node in lowered.graph if node.op_type == "Attention"] == ["Attention"]
    assert not lowered.functions


def test_native_windowed_attention_keeps_its_body_and_has_no_plugin() -> None:
    portable = attention_model(_WINDOW, _WINDOW, _DENSE)
    lowered = tensorrt_graph(portable, dtype="float16", attention_impl=AttentionImpl.NATIVE)
    assert plugin_nodes(lowered) == []
    assert [name for _, name, _ in lowered.functions] == ["SlidingWindowAttention_global4"]
    assert [node.op_type for node in lowered.graph if node.domain == "hdexport"] == [
        "SlidingWindowAttention_global4"
    ] * 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_plugin_takes_every_dtype_even_where_dense_attention_is_not_fused(dtype: str) -> None:
    lowered = tensorrt_graph(attention_model(replace(_WINDOW, dtype=dtype), Dense(dtype=dtype)), dtype=dtype)
    assert len(plugin_nodes(lowered)) == 1
    assert (("hdexport", "DenseAttention", "") in lowered.functions) == (dtype == "float32")


def test_nodes_of_different_windows_and_dilations_all_become_plugins() -> None:
    portable = attention_model(replace(_WINDOW, dilation=(1, 2), bound=0))
    lowered = tensorrt_graph(portable, dtype="float16")
    assert [node.attributes["dilation"].as_ints() for node in plugin_nodes(lowered)] == [(1, 2)]
    assert not lowered.functions


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"head_dim": 48}, r"not support head_dim 48; they support 32, 64, 80, 96, 128"),
        ({"left": 2**31}, r"left is 2147483648; TensorRT reads 32 bits, 2147483647 at most"),
        ({"dilation": (1, 2, 3)}, r"dilation is \[1, 2, 3\]; it must have 1 value or 2"),
    ],
)
def test_what_no_kernel_computes_names_what_it_does_and_the_way_around(wrong: dict[str, object], message: str) -> None:
    portable = attention_model(replace(_WINDOW, **wrong))
    with pytest.raises(ExportError, match=rf"SlidingWindowAttention by our plugin here\. .*{message}"):
        tensorrt_graph(portable, dtype="float16")
    with pytest.raises(ExportError, match=r"\n.*--attention-impl native"):
        tensorrt_graph(portable, dtype="float16")


def test_a_graph_that_does_not_state_a_shape_is_refused() -> None:
    portable = attention_model(_WINDOW)
    portable.graph.inputs[0].shape = None
    with pytest.raises(ExportError, match=r"does not state the shapes(.|\n)*--attention-impl native"):
        tensorrt_graph(portable, dtype="float16")


@pytest.mark.parametrize(("bound", "impl"), list(itertools.product([3840, 3841], AttentionImpl)))
def test_more_global_tokens_than_tensorrt_selects_are_refused_where_it_selects_them(
    bound: int, impl: AttentionImpl
) -> None:
    portable = attention_model(replace(_WINDOW, bound=bound))
    if bound > 3840 and impl is AttentionImpl.NATIVE:
        with pytest.raises(ExportError, match=r"up to 3841 global tokens .* 3840 at most\.\n.*--max-global 3840"):
            tensorrt_graph(portable, dtype="float16", attention_impl=impl)
    else:
        tensorrt_graph(portable, dtype="float16", attention_impl=impl)
