"""The TensorRT lowering: it computes what the operator's definition says, and builds into fused attention."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from hdexport.graph.targets.tensorrt.lowering import AttentionImpl, tensorrt_graph
from hdexport.graph.targets.tensorrt.packages import load_variant
from hdexport.graph.targets.tensorrt.plugin_nodes import block_index_use_of, own_shapes, plugin_nodes
from hdplugins.attention.plugin_spec import BlockIndexUse
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import ExportError
from support.attention_graphs import HEADS, attention_model, chain_of
from support.attention_layers import PADDINGS, Layer, token_kinds
from support.comparators import assert_close, named_case
from support.grids import nightly_unless
from support.operators.blocks import Blocks
from support.operators.dense import Dense
from support.operators.distance import Clipped, Shared
from support.operators.window import Window

_BUILT = {
    *((64, False, dtype) for dtype in ("float16", "bfloat16", "float32")),
    *((64, True, dtype) for dtype in ("bfloat16", "float32")),
    *((8, False, "float16"), (9, True, "float16"), (256, False, "float16"), (257, True, "float16")),
}
"""(head_dim, whether there are numbers by distance, dtype) that every run builds.

What is fused is decided by the head's size and by the dtype; numbers by distance make a mask.
"""

_BUILT_FORMS = {(0, "float16"), (1, "bfloat16"), (2, "float16"), (2, "float32"), (3, "bfloat16"), (4, "float16")}
"""(number of kind of heads, dtype) that every run builds."""

_DENSE = Dense(dtype="float16")
_GROUPED = Dense(heads=4, kv_heads=2, dtype="float16")
_CAUSAL = Dense(heads=6, kv_heads=2, causal=1, dtype="float16")
_BY_DISTANCE = Shared(reach=7, dtype="float16")
_WINDOW = Window(left=16, right=16, bound=4, dtype="float16")


def native_graph(*layers: Layer, dtype: str, longest: int | None = 1024) -> ir.Model:
    """Lowered, without plugins."""
    native = AttentionImpl.NATIVE
    return tensorrt_graph(attention_model(*layers), dtype=dtype, attention_impl=native, longest=longest)


Run = Callable[[None, dict[str, np.ndarray]], Sequence[np.ndarray]]


def _by_the_standard(model: ir.Model) -> Run:
    """What runs a graph by ONNX's own definition of each operator."""
    proto = ir.serde.serialize_model(model)
    onnx.checker.check_model(proto)
    return ReferenceEvaluator(proto).run


def _by_onnxruntime(model: ir.Model) -> Run:
    """What runs a graph in ONNX Runtime, whose attention wants the row of the mask repeated for every query."""
    model = model.clone()
    for node in [node for node in model.graph if node.op_type == "Attention" and len(node.inputs) > 3]:
        sizes = ir.node("Shape", [node.inputs[0]], {"start": 2, "end": 3})
        ones = ir.node("Constant", [], {"value_ints": [1, 1]})
        one = ir.node("Constant", [], {"value_ints": [1]})
        shape = ir.node("Concat", [ones.outputs[0], sizes.outputs[0], one.outputs[0]], {"axis": 0})
        repeated = ir.node("Expand", [node.inputs[3], shape.outputs[0]])
        model.graph.insert_before(node, [sizes, ones, one, shape, repeated])
        node.replace_input_with(3, repeated.outputs[0])
    return onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString()).run


@pytest.mark.pinned  # ONNX Runtime 1.26 computes Attention otherwise
@pytest.mark.parametrize(
    "layer", [_DENSE, _BY_DISTANCE, _GROUPED, _CAUSAL], ids=["dense", "by distance", "grouped", "causal"]
)
def test_lowered_attention_matches_the_definition(layer: Layer) -> None:
    """By ONNX's definition of each operator, and in ONNX Runtime."""
    lowered = native_graph(layer, dtype="float16")
    runs = _by_the_standard(lowered), _by_onnxruntime(lowered)
    for tokens, kind in itertools.product((1, 2, 63, 64, 65, 257), PADDINGS):
        generator = np.random.default_rng(tokens)
        shapes = {name: (3, tokens, layer.heads_of(name), 32) for name in ("query", "key", "value")}
        feeds = {name: generator.normal(size=shape).astype(np.float16) for name, shape in shapes.items()}
        feeds["key_mask"] = token_kinds(kind, tokens) != 0
        exact = [torch.from_numpy(feeds[name]).double() for name in ("query", "key", "value")]
        expected = layer.by_definition(exact, {"key_mask": torch.from_numpy(feeds["key_mask"])}).numpy()
        # The standard's evaluator is slow.
        for run in runs if tokens < 100 else runs[1:]:
            (actual,) = run(None, feeds)
            with named_case(tokens, kind):
                # Measured 0.0028: weights and results are rounded to float16, as are scores of up to 8 (by 2**-9).
                assert_close(actual, expected, atol=2**-8)
                if kind == "all":
                    assert (actual[0] == 0).all()


def test_content_of_padding_does_not_change_other_tokens() -> None:
    lowered = tensorrt_graph(attention_model(_DENSE), dtype="float16")
    generator = np.random.default_rng(0)
    feeds = {name: generator.normal(size=(2, 65, HEADS, 32)).astype(np.float16) for name in ("query", "key", "value")}
    feeds["key_mask"] = token_kinds("right", 65, batch=2) != 0
    run = _by_onnxruntime(lowered)
    (before,) = run(None, feeds)
    feeds["value"][0, 40:] = np.inf
    feeds["key"][0, 40:] = 100
    (after,) = run(None, feeds)
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


@pytest.mark.parametrize("head_dim", [8, 257])
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
    ("head_dim", "by_distance", "dtype"),
    [
        pytest.param(
            head_dim,
            by_distance,
            dtype,
            marks=() if (head_dim, by_distance, dtype) in _BUILT else pytest.mark.nightly,
        )
        for head_dim in (8, 9, 32, 64, 256, 257)
        for by_distance in (False, True)
        for dtype in ("float16", "bfloat16", "float32")
    ],
)
def test_lowered_attention_builds(head_dim: int, by_distance: bool, dtype: str, tmp_path: Path) -> None:
    layer = (Shared if by_distance else Dense)(dtype=dtype, head_dim=head_dim)
    fused = dtype != "float32" and head_dim not in (8, 257)
    assert _builds_fused(layer, tmp_path) == fused


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        nightly_unless((number, dtype) in _BUILT_FORMS, form, dtype)
        for number, form in enumerate(
            (
                {"causal": 1},
                {"heads": 4, "kv_heads": 1},
                {"heads": 4, "kv_heads": 2, "causal": 1},
                {"heads": 1},
                {"heads": 1, "causal": 1},
            )
        )
        for dtype in ("float16", "bfloat16", "float32")
    ],
    ids=str,
)
def test_attention_of_all_kinds_of_heads_builds(form: dict[str, int], dtype: str, tmp_path: Path) -> None:
    fused = dtype != "float32" and form != {"heads": 1}
    assert _builds_fused(Dense(dtype=dtype, head_dim=64, **form), tmp_path) == fused


def _builds_fused(layer: Layer, tmp_path: Path) -> bool:
    """Whether TensorRT-RTX, which builds the lowered graph, sees an attention layer in it."""
    pytest.importorskip("tensorrt_rtx_libs", reason="TensorRT-RTX builds engines without a GPU; not installed")
    # Through hdexport, or plugins would be out of reach for the tests that follow in this process.
    trt = load_variant(Backend.TENSORRT_RTX)
    path = tmp_path / "lowered.onnx"
    ir.save(native_graph(layer, dtype=layer.dtype), path)
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
    assert parser.parse_from_file(str(path)), [parser.get_error(i).desc() for i in range(parser.num_errors)]
    kinds = {network.get_layer(index).type for index in range(network.num_layers)}
    config = builder.create_builder_config()
    for tokens in (96, 192):
        profile = builder.create_optimization_profile()
        for name in ("query", "key", "value"):
            heads = (layer.heads_of(name), layer.head_dim)
            shapes = [(batch, length, *heads) for batch, length in ((1, 1), (2, tokens), (8, tokens))]
            profile.set_shape(name, *shapes)
        profile.set_shape("key_mask", (1, 1), (2, tokens), (8, tokens))
        config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is not None
    return trt.LayerType.ATTENTION_INPUT in kinds


def test_windowed_attention_is_a_plugin_without_a_body() -> None:
    lowered = tensorrt_graph(attention_model(_WINDOW, _WINDOW, _DENSE), dtype="float16")
    ours = plugin_nodes(lowered)
    assert [node.op_type for node in ours] == ["SlidingWindowAttention"] * 2
    assert {node.attributes["plugin_namespace"].as_string() for node in ours} == {"hdexport"}
    assert {node.attributes["plugin_version"].as_string() for node in ours} == {"2"}
    assert ours[0].attributes["left"].as_int() == 16
    assert [node.op_type for node in lowered.graph if node.op_type == "Attention"] == ["Attention"]
    assert not lowered.functions


def uses_of_plans(*layers: Layer) -> list[BlockIndexUse]:
    return [
        block_index_use_of(node) for node in plugin_nodes(tensorrt_graph(attention_model(*layers), dtype="float16"))
    ]


def test_layers_with_equal_plans_share_one() -> None:
    """The mask, the bound of globals and, for blocks, all but the scale decide a block index."""
    blocks = Blocks(block=64, repeats=3, by_row=1, head_dim=64, dtype="float16")
    wider, narrow, own = replace(_WINDOW, right=40), replace(_WINDOW, left=3), BlockIndexUse.PRIVATE
    assert uses_of_plans(_WINDOW, wider, narrow) == [BlockIndexUse.OUTPUT, BlockIndexUse.INPUT, BlockIndexUse.INPUT]
    assert uses_of_plans(blocks, blocks) == [BlockIndexUse.OUTPUT, BlockIndexUse.INPUT]
    assert uses_of_plans(_WINDOW) == [own]
    assert uses_of_plans(_WINDOW, replace(_WINDOW, bound=9)) == [own, own]
    assert uses_of_plans(blocks, replace(blocks, dense=500)) == [own, own]
    # Their plans are quadratic in tokens.
    all_global = replace(blocks, first=10**6)
    assert uses_of_plans(all_global, all_global) == [own, own]


def test_layers_with_heads_of_other_sizes_share_no_block_index() -> None:
    """Their kernels take other steps of keys, and a block index of blocks says which steps need no mask."""
    blocks = Blocks(block=32, repeats=3, by_row=1, head_dim=64, dtype="float16")
    model = attention_model(blocks, blocks)
    _, second = model.graph
    for place in range(3):
        given = second.inputs[place]
        shape = ir.Shape([*given.shape[:3], 128])
        wider = ir.Value(name=f"wider_{place}", shape=shape, type=given.type)
        model.graph.inputs.append(wider)
        second.replace_input_with(place, wider)
    assert {block_index_use_of(node) for node in plugin_nodes(tensorrt_graph(model, dtype="float16"))} == {
        BlockIndexUse.PRIVATE
    }


def test_a_shared_block_index_is_the_last_input() -> None:
    first, second = plugin_nodes(tensorrt_graph(attention_model(_WINDOW, _WINDOW), dtype="float16"))
    result, block_index = first.outputs
    assert second.inputs[0] is result
    assert second.inputs[-1] is block_index
    assert len(second.inputs) == len(first.inputs) + 1
    assert own_shapes(second) == own_shapes(first)


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
    with pytest.raises(ExportError, match=rf"plugin cannot run SlidingWindowAttention here\. .*{message}"):
        tensorrt_graph(portable, dtype="float16")
    with pytest.raises(ExportError, match=r"\n.*attention_impl='native'"):
        tensorrt_graph(portable, dtype="float16")


def test_a_graph_that_does_not_state_a_shape_is_refused() -> None:
    portable = attention_model(_WINDOW)
    portable.graph.inputs[0].shape = None
    with pytest.raises(ExportError, match=r"does not state the shapes(.|\n)*attention_impl='native'"):
        tensorrt_graph(portable, dtype="float16")


@pytest.mark.parametrize(("bound", "impl"), list(itertools.product([3840, 3841], AttentionImpl)))
def test_more_global_tokens_than_tensorrt_selects_are_refused_where_it_selects_them(
    bound: int, impl: AttentionImpl
) -> None:
    portable = attention_model(replace(_WINDOW, bound=bound))
    if bound > 3840 and impl is AttentionImpl.NATIVE:
        with pytest.raises(ExportError, match=r"up to 3841 global tokens .* at most 3840\.\n.*max_global=3840"):
            tensorrt_graph(portable, dtype="float16", attention_impl=impl)
    else:
        tensorrt_graph(portable, dtype="float16", attention_impl=impl)


@pytest.mark.parametrize(
    ("layer", "longest", "is_layer"),
    [
        (_BY_DISTANCE, 1024, True),
        (_BY_DISTANCE, 1025, False),
        (_BY_DISTANCE, None, False),
        (replace(_BY_DISTANCE, values=True), 64, False),
        (Clipped(by_query=True, dtype="float16"), 64, False),
        (replace(_BY_DISTANCE, dtype="float32"), 64, False),
    ],
)
def test_attention_by_distance_is_a_layer_in_engines_for_short_texts(
    layer: Clipped, longest: int | None, is_layer: bool
) -> None:
    shared = isinstance(layer, Shared)
    graph = attention_model(layer, layer) if shared else ir.serde.deserialize_model(chain_of([layer]))
    native = AttentionImpl.NATIVE
    lowered = tensorrt_graph(graph, dtype=layer.dtype, attention_impl=native, longest=longest)
    operators = [node.op_type for node in lowered.graph]
    # Layers share what is made of their numbers.
    assert operators.count("ClippedDistanceAttention_bias") == is_layer
    assert operators.count("Attention") == 2 * is_layer
    assert [name for _, name, _ in lowered.functions] == ["ClippedDistanceAttention_bias" if is_layer else layer.name]
