"""The lowering for ONNX Runtime on a CPU: by the definition on both sides of every choice, in linear memory."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto

from hdexport.graph.targets.onnxruntime.cpu import lower_for_onnxruntime_cpu
from support.attention_graphs import HEADS, answer_by_definition, insert_after, portable_graph, session_of, states_of
from support.attention_layers import GLOBALS, PADDINGS, Description, SparseLayer, token_kinds
from support.comparators import assert_close, named_case
from support.described_operators import DESCRIPTIONS
from support.function_bodies import growth_bytes, growths_bytes
from support.grids import nightly_unless
from support.operators.dense import Dense
from support.operators.distance import Shared
from support.operators.window import Window

LENGTHS = {1, 7, 8, 9, 15, 16, 17, 18, 32, 33, 97, 211}
LAYERS = {layer: longest for described in DESCRIPTIONS.values() for layer, longest in described.lowered.items()}
"""Layer -> the longest text whose queries attend to each key exactly once, or None."""

CHAINS: dict[str, Sequence[Dense | SparseLayer]] = {
    "DenseAttention": (Dense(),),
    "ClippedDistanceAttention": (Shared(reach=9), Shared(reach=9), Shared(values=True)),
    **{name: described.lowered_chain for name, described in DESCRIPTIONS.items()},
}

each_operator = pytest.mark.parametrize("described", DESCRIPTIONS.values(), ids=DESCRIPTIONS)
each_layer = pytest.mark.parametrize("layer", LAYERS, ids=str)
each_changed = pytest.mark.parametrize(
    ("layer", "changed"),
    [(chain[0], name) for chain in CHAINS.values() for name in (*chain[0].operator.state_names, "attended")],
    ids=str,
)


def feeds_of(kinds: np.ndarray, *layers: Dense | SparseLayer, head_dim: int = 32) -> dict[str, np.ndarray]:
    states = states_of(*kinds.shape, head_dim=head_dim, layer=layers[0])
    first = layers[0].operator.state_names[0]
    heads = torch.from_numpy(states[first]).unflatten(-1, (HEADS, -1))
    states[first] = layers[0].decided(heads).flatten(2).numpy()
    masks = {"token_kind": kinds, "token_mask": kinds, "key_mask": kinds != 0}
    names = {name for layer in layers for name in layer.inputs}
    return states | {name: mask for name, mask in masks.items() if name in names}


@functools.cache
def lowered_session(*layers: Dense | SparseLayer, head_dim: int = 32) -> onnxruntime.InferenceSession:
    return session_of(lower_for_onnxruntime_cpu(portable_graph(*layers, head_dim=head_dim)))


def assert_right(session: onnxruntime.InferenceSession, kinds: np.ndarray, *layers: Dense | SparseLayer) -> None:
    feeds = feeds_of(kinds, *layers)
    (got,) = session.run(None, feeds)
    assert_close(got, answer_by_definition(layers, feeds), atol=atol_of(layers[0]))
    if isinstance(layers[0], SparseLayer):
        assert (got[kinds == 0] == 0).all()


def atol_of(layer: Dense | SparseLayer) -> float:
    # Measured 4.1e-6 for dense attention; values reach 5.7.
    return DESCRIPTIONS[layer.operator.name].lowered_atol if isinstance(layer, SparseLayer) else 5e-6


def bound_of(layer: Dense | SparseLayer) -> int:
    return layer.bound if isinstance(layer, SparseLayer) else 0


def node_types(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.all_nodes())


@pytest.mark.parametrize(
    ("layer", "head_dim"),
    [
        *((Dense(), size) for size in (8, 32, 64)),
        (Dense(causal=1), 32),
        (Dense(heads=6, kv_heads=2), 32),
        (Dense(heads=4, kv_heads=2, causal=1), 64),
        (Dense(heads=4, kv_heads=1, causal=1), 20),
    ],
    ids=str,
)
def test_lowered_dense_attention_matches_the_definition(layer: Dense, head_dim: int) -> None:
    batches = itertools.cycle((1, 3))
    for tokens, mask in itertools.product((1, 2, 63, 64, 65, 127), PADDINGS):
        batch = next(batches)
        feeds = feeds_of(token_kinds(mask, tokens, batch=batch), layer, head_dim=head_dim)
        (got,) = lowered_session(layer, head_dim=head_dim).run(None, feeds)
        with named_case(tokens, mask, batch):
            assert_close(got, answer_by_definition([layer], feeds), atol=atol_of(layer))
            if mask == "all":
                assert (got[0] == 0).all()


def test_causal_attentions_share_where_tokens_go_and_repeat_no_keys() -> None:
    counts = node_types(lower_for_onnxruntime_cpu(portable_graph(*[Dense(heads=4, kv_heads=2, causal=1)] * 3)))
    assert (counts["GroupQueryAttention"], counts["If"], counts["CumSum"]) == (6, 3, 1)
    assert not {"Expand", "MultiHeadAttention", "Softmax", "Transpose"} & set(counts)


@pytest.mark.pinned  # ONNX Runtime before 1.28 keeps all scores of causal attention
@pytest.mark.parametrize("padding", [0, 100])
def test_memory_of_causal_attention_is_linear_in_tokens_with_padding_as_well(padding: int, tmp_path: Path) -> None:
    """8192 tokens: the scores of a head would take 256 MiB, the states take 2 MiB."""
    path = tmp_path / "model.onnx"
    ir.save(lower_for_onnxruntime_cpu(portable_graph(Dense(causal=1))), path)
    grown_bytes = growth_bytes(path, tokens=8192, padding=padding)
    assert grown_bytes < 64 * 1024 * 1024, f"{grown_bytes} bytes"


def test_every_dense_attention_is_fused_and_looks_at_one_mask() -> None:
    lowered = lower_for_onnxruntime_cpu(portable_graph(Dense(), Dense(), Dense()))
    counts = node_types(lowered)
    assert (counts["If"], counts["MultiHeadAttention"], counts["ReduceMin"]) == (3, 6, 1)
    assert not {"DenseAttention", "Transpose", "Softmax"} & set(counts)
    assert not lowered.functions


@pytest.mark.parametrize("turned", [False, True])
def test_memory_of_dense_attention_without_padding_is_linear_in_tokens(turned: bool, tmp_path: Path) -> None:
    """8192 tokens: the scores of a head would take 256 MiB, the states take 2 MiB; so too by rotary positions."""
    model = portable_graph(Dense())
    if turned:
        (node,) = (node for node in model.graph if node.op_type == "DenseAttention")
        for state in node.inputs[:2]:
            assert state is not None
            insert_after(state, "Sin")
    path = tmp_path / "model.onnx"
    ir.save(lower_for_onnxruntime_cpu(model), path)
    grown_bytes = growth_bytes(path, tokens=8192)
    assert grown_bytes < 64 * 1024 * 1024, f"{grown_bytes} bytes"


def test_nothing_is_quadratic_in_a_real_graph(tiny_bundles) -> None:
    counts = node_types(tiny_bundles("bert").cpu_graph)
    assert "Softmax" not in counts
    assert (counts["MultiHeadAttention"], counts["Gelu"], counts["LayerNormalization"]) == (4, 2, 5)


@each_layer
def test_lowered_attention_matches_the_definition_at_every_length(layer: SparseLayer) -> None:
    """Globals and paddings alternate, so that each length meets several pairs of them."""
    edge = LAYERS[layer] or 0
    around = {edge - 1, edge, edge + 1} if 1 < edge < 300 else set()
    for number, tokens in enumerate(sorted(LENGTHS | around)):
        for turn, padding in enumerate(("none", *PADDINGS[1 + number % 4 :][:2])):
            batch = 1 if (number + turn) % 3 == 0 else 3
            globals_ = GLOBALS[(number + turn) % 4]
            kinds = token_kinds(padding, tokens, globals_=globals_, bound=layer.bound, batch=batch)
            assert_right(lowered_session(layer), kinds, layer)


@each_layer
def test_globals_and_padding_mix(layer: SparseLayer) -> None:
    """In a short and a long text, which alternate where there are globals: each padding and each globals meet both."""
    pairs = itertools.product(enumerate(PADDINGS), enumerate(GLOBALS if layer.bound else ("none",)))
    for (row, padding), (column, globals_) in pairs:
        for tokens in ((9, 97)[(row + column) % 2],) if layer.bound else (9, 97):
            kinds = token_kinds(padding, tokens, globals_=globals_, bound=layer.bound)
            with named_case(padding, globals_, tokens):
                assert_right(lowered_session(layer), kinds, layer)


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if isinstance(layer, Window)], ids=str)
def test_unseen_tokens_see_their_window(layer: Window) -> None:
    for number, tokens in enumerate((4, *layer.lengths[1:])):
        globals_ = ("none", "none", "scattered")[number % 3] if layer.bound else "none"
        kinds = token_kinds("unseen", tokens, globals_=globals_, bound=layer.bound, batch=3 - 2 * (number % 2))
        assert_right(lowered_session(layer), kinds, layer)


@pytest.mark.parametrize(
    ("layer", "tokens", "batch"), [case for described in DESCRIPTIONS.values() for case in described.lowered_long]
)
def test_lowered_attention_matches_the_definition_on_long_texts(layer: SparseLayer, tokens: int, batch: int) -> None:
    kinds = token_kinds("right", tokens, globals_="scattered", bound=layer.bound, batch=batch)
    assert_right(lowered_session(layer), kinds, layer)


@pytest.mark.parametrize(
    ("layer", "longest"), [(layer, longest) for layer, longest in LAYERS.items() if longest and longest < 300], ids=str
)
def test_all_keys_are_attended_to_exactly_where_nothing_is_hidden(layer: SparseLayer, longest: int) -> None:
    """The branch for it is made a wrong one; where the answer is right, the other was taken."""
    model = lower_for_onnxruntime_cpu(portable_graph(layer))
    (choice,) = (node for node in model.graph if node.op_type == "If")
    (fused,) = (node for node in choice.attributes["then_branch"].as_graph() if node.op_type == "MultiHeadAttention")
    fused.attributes["scale"] = ir.AttrFloat32("scale", -1.0)
    session = session_of(model)
    for tokens in {1, 2, longest - 1, longest, longest + 1, 2 * longest} - {0}:
        for padding in (*PADDINGS, "unseen") if isinstance(layer, Window) else PADDINGS:
            kinds = token_kinds(padding, tokens, globals_="first", bound=layer.bound)
            feeds = feeds_of(kinds, layer)
            (got,) = session.run(None, feeds)
            # Of one key, any softmax is 1.
            wrong = not np.allclose(got, answer_by_definition([layer], feeds), atol=0.1)
            assert wrong == ((kinds > 0).all() and 1 < tokens <= longest), (tokens, padding)


@pytest.mark.parametrize("layer", [layer for layer, longest in LAYERS.items() if longest is None], ids=str)
def test_a_layer_that_never_sees_all_keys_once_has_no_branch_for_it(layer: SparseLayer) -> None:
    assert not {"If", "MultiHeadAttention"} & set(node_types(lower_for_onnxruntime_cpu(portable_graph(layer))))


@each_operator
def test_layers_that_differ_share_a_graph(described: Description) -> None:
    """Several attributes, dense attention among them, several branches taken."""
    first, *others = described.lowered_chain
    layers = (first, Dense(), *others)
    for tokens, padding in ((8, "none"), (40, "none"), (97, "none"), (97, "holes")):
        kinds = token_kinds(padding, tokens, globals_="scattered", bound=first.bound)
        assert_right(lowered_session(*layers), kinds, *layers)


@each_operator
def test_a_graph_holds_one_body_for_layers_alike_and_asks_about_the_text_once(described: Description) -> None:
    layers, scans, fused = described.lowered_alike
    lowered = lower_for_onnxruntime_cpu(portable_graph(*layers))
    counts = node_types(lowered)
    assert (counts["If"], counts["MultiHeadAttention"], counts["ReduceMin"]) == (fused, fused, min(fused, 1))
    assert counts["Transpose"] == 0, "bodies alone swap heads and tokens"
    bodies = [function.graph.all_nodes() for function in lowered.functions.values()]
    assert tuple(sum(node.op_type == "Scan" for node in nodes) for nodes in bodies) == scans


@pytest.mark.parametrize(
    ("layers", "dtype"),
    [
        nightly_unless(dtype == TensorProto.FLOAT16 or name == "DenseAttention", layers, dtype)
        for name, layers in CHAINS.items()
        for dtype in (TensorProto.FLOAT16, TensorProto.BFLOAT16)
    ],
    ids=str,
)
def test_a_half_precision_graph_is_computed_in_float32(layers: Sequence[Dense | SparseLayer], dtype: int) -> None:
    portable = portable_graph(*layers, dtype=dtype)
    lowered = lower_for_onnxruntime_cpu(portable.clone())
    half = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    assert not [value for node in lowered.graph.all_nodes() for value in node.outputs if value.dtype in half]
    names = {layer.name for layer in layers}
    assert {node.outputs[0].dtype for node in portable.graph if node.op_type in names} == {ir.DataType(dtype)}
    session = session_of(lowered)
    for tokens, padding in ((17, "none"), (97, "none"), (65, "left")):
        kinds = token_kinds(padding, tokens, globals_="scattered", bound=bound_of(layers[0]))
        assert_right(session, kinds, *layers)


@each_changed
def test_what_changes_between_splitting_attention_and_merging_stays(layer: Dense | SparseLayer, changed: str) -> None:
    """As rotary positions do, and the rows of global tokens."""
    model = portable_graph(layer)
    (node,) = (node for node in model.graph if node.op_type == layer.name)
    insert_after(
        node.outputs[0] if changed == "attended" else node.inputs[layer.operator.state_names.index(changed)], "Sin"
    )
    session = session_of(lower_for_onnxruntime_cpu(model))
    for tokens, padding in ((17, "none"), (37, "none"), (97, "none"), (37, "holes")):
        feeds = feeds_of(token_kinds(padding, tokens, globals_="scattered", bound=bound_of(layer)), layer)
        exact = {name: np.sin(feed.astype(np.float64)) if name == changed else feed for name, feed in feeds.items()}
        expected = answer_by_definition([layer], exact)
        (got,) = session.run(None, feeds)
        assert_close(got, np.sin(expected) if changed == "attended" else expected, atol=atol_of(layer))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc, which Linux has")
@each_operator
def test_memory_is_linear_in_tokens_and_of_the_batch_grows_what_comes_out(
    described: Description, tmp_path: Path
) -> None:
    layers, (fewer, more), texts = described.lowered_wide
    path = tmp_path / "model.onnx"
    ir.save(lower_for_onnxruntime_cpu(portable_graph(*layers)), path)
    short, long = growths_bytes(path, fewer, more)
    assert short > fewer * 64 * 4, "less than the result: nothing was measured"
    assert long <= 2.2 * short
    assert growth_bytes(path, tokens=512, batch=texts) <= 1.2 * short
