"""FAVOR+: its definition by hand, and its ONNX bodies against the definition around every chunk."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from hdplugins.attention.favor.onnx_functions import CHUNK_TOKENS
from hdplugins.attention.favor.reference import draw_projection
from hdplugins.attention.function_bodies import function_of_node
from hdplugins.attention.operator import BodyVariant
from support.attention_graphs import chain_of
from support.attention_layers import PADDINGS, token_kinds
from support.comparators import assert_close, named_case
from support.exact_answers import answer_of_body, assert_as_accurate_as, error_of_pytorch, exact_answer
from support.function_bodies import (
    growths_bytes,
    new_session,
    nodes_within,
    operators_of,
    planned_bytes,
    run,
    unnoticed_mistakes,
)
from support.grids import nightly_unless
from support.operators.favor import NODES, Favor, by_hand, inputs_of, wrong_nodes

LENGTHS = (1, 2, 5, *(count * CHUNK_TOKENS + step for count in (1, 2) for step in (-1, 0, 1)), 331)
WIDE = Favor(heads=4, head_dim=64, features=256)

each_variant = pytest.mark.parametrize("variant", BodyVariant, ids=lambda variant: variant.value)
each_node = pytest.mark.parametrize("node", NODES, ids=str)


@functools.cache
def usual_error_of_pytorch(node: Favor) -> float:
    """The largest error in several texts: the effect of rounding depends on the exponents of each text."""
    return max(error_of_pytorch(node, inputs_of(node, token_kinds("none", tokens))) for tokens in LENGTHS)


def assert_right(node: Favor, got: np.ndarray, inputs: Mapping[str, np.ndarray]) -> None:
    assert_as_accurate_as(usual_error_of_pytorch(node), node, got, inputs)


# The definition.


@each_node
def test_the_definition_is_a_mean_weighted_by_products_of_features(node: Favor) -> None:
    node = replace(node, dtype="float64")
    for padding in PADDINGS:
        inputs = inputs_of(node, token_kinds(padding, 11, batch=2), size=0.8)
        got = exact_answer(node, inputs)
        for text, head in np.ndindex(got.shape[::2]):
            with named_case(padding, text, head):
                assert_close(got[text, :, head], by_hand(node, inputs, text=text, head=head), atol=1e-11)


def test_many_features_come_near_to_softmax_attention() -> None:
    """Features approximate a softmax by their number; few features do not come near."""
    inputs = inputs_of(Favor(dtype="float64"), token_kinds("right", 29), size=0.6)
    states = [torch.from_numpy(inputs[name]).transpose(1, 2) for name in ("query", "key", "value")]
    mask = torch.from_numpy(inputs["key_mask"])[:, None, None]
    softmax = torch.nn.functional.scaled_dot_product_attention(*states, attn_mask=mask).transpose(1, 2).numpy()

    def error(features: int) -> float:
        answer = exact_answer(Favor(features=features, epsilon=1e-12), inputs)
        return float(np.linalg.norm(answer - softmax) / np.linalg.norm(softmax))

    many, some, few = error(30000), error(300), error(3)
    assert many < 0.1 < some < few, (many, some, few)


def test_directions_are_orthogonal_as_long_as_gaussians_and_of_their_seed_alone() -> None:
    projection = draw_projection(5, features=2 * 16 + 3, head_dim=16)
    lengths = projection.norm(dim=1)
    unit = (projection / lengths[:, None]).double()
    for block in unit.split(16):
        torch.testing.assert_close(block @ block.mT, torch.eye(len(block), dtype=torch.float64), atol=1e-6, rtol=0)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(draw_projection(5, features=35, head_dim=16), projection)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(draw_projection(6, features=35, head_dim=16), projection)
    many = draw_projection(0, features=4000, head_dim=16)
    assert many.dtype == torch.float32
    # Squares of lengths are of a chi-squared distribution: mean 16, variance 32.
    squares = many.square().sum(1)
    assert abs(squares.mean() - 16) < 0.5
    assert abs(squares.var() - 32) < 4
    assert (many.mean(0).abs() < 0.1).all()


def test_directions_do_not_change() -> None:
    """Bundles are verified with directions that are drawn again: of another seed's, checks would fail."""
    expected = [[0.476175, -0.673257], [0.509281, 0.3602], [-1.307232, 0.486175]]
    torch.testing.assert_close(draw_projection(0, features=3, head_dim=2), torch.tensor(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": 0}, "features is 0; it must be 1 or more"),
        ({"epsilon": 0.0}, "epsilon is 0.0; it must be above 0"),
        ({"compat": 2}, "compat is 2; it must be 0 or 1"),
        ({"features": 41}, r"projection is \[40, 32\]; it must be \[features, head_dim\], \[41, 32\]"),
    ],
    ids=str,
)
def test_what_the_operator_does_not_define_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exact_answer(NODES[0], inputs_of(NODES[0], token_kinds("none", 5)), **changes)


@pytest.mark.parametrize("changes", [{"features": 0}, {"epsilon": -1.0}, {"compat": 3}], ids=str)
def test_a_body_of_nonsense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(changes))} is"):
        function_of_node(NODES[0].operator, inputs=5, attributes=NODES[0].node_attributes | changes)


# The bodies against the definition.


@each_node
def test_a_body_matches_the_definition_at_every_length(node: Favor) -> None:
    """Paddings and batches alternate."""
    paddings, batches = itertools.cycle(PADDINGS), itertools.cycle((3, 1, 3))
    for tokens in LENGTHS:
        padding, batch = next(paddings), next(batches)
        inputs = inputs_of(node, token_kinds(padding, tokens, batch=batch))
        for variant in BodyVariant:
            with named_case(variant.value, tokens, padding, batch):
                assert_right(node, answer_of_body(node, variant, inputs), inputs)


@pytest.mark.parametrize("node", [nightly_unless(node in NODES[:2], node) for node in NODES], ids=str)
def test_every_padding_meets_every_batch(node: Favor) -> None:
    for padding, tokens, batch in itertools.product(PADDINGS, (7, CHUNK_TOKENS + 9), (1, 3)):
        inputs = inputs_of(node, token_kinds(padding, tokens, batch=batch))
        for variant in BodyVariant:
            with named_case(variant.value, padding, tokens, batch):
                got = answer_of_body(node, variant, inputs)
                assert_right(node, got, inputs)
                if padding == "all":
                    assert (got[0] == 0).all()


@each_variant
def test_padding_changes_nothing_of_a_text(variant: BodyVariant) -> None:
    """Neither the amount nor the content of padding: keys that would be the highest by far, and huge values."""
    tokens = 37
    alone = inputs_of(NODES[0], token_kinds("none", tokens, batch=1))
    before = answer_of_body(NODES[0], variant, alone)
    for front, behind in ((0, 300), (300, 0), (11, 240)):
        padded = {
            name: np.pad(array, [(0, 0), (front, behind), (0, 0), (0, 0)], constant_values=50.0)
            for name, array in alone.items()
            if name != "key_mask"
        }
        padded["key_mask"] = np.pad(alone["key_mask"], [(0, 0), (front, behind)])
        got = answer_of_body(NODES[0], variant, padded)[:, front : front + tokens]
        assert_close(got, before.astype(np.float64), atol=4e-6)  # measured 1.2e-6


@each_variant
def test_padding_counts_in_the_mode_that_is_compatible(variant: BodyVariant) -> None:
    inputs = inputs_of(NODES[1], token_kinds("right", 37, batch=1))
    padded, real = answer_of_body(NODES[1], variant, inputs), int(inputs["key_mask"].sum())
    alone = {name: array[:, :real] for name, array in inputs.items()}
    assert np.abs(padded[:, :real] - answer_of_body(NODES[1], variant, alone)).max() > 0.1


@each_variant
@pytest.mark.parametrize("node", [NODES[2], NODES[4]], ids=str)
@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_large_scores_overflow_in_no_dtype(node: Favor, size: float, variant: BodyVariant) -> None:
    """Products of float16 states reach 7e8."""
    inputs = inputs_of(node, token_kinds("right", 40), size=size)
    got = answer_of_body(node, variant, inputs)
    # Nearly all features are epsilon, and an exponential that is not has the rounding of a large exponent.
    assert_close(got, exact_answer(node, inputs), atol=2e-3)


@each_variant
def test_bfloat16_is_accumulated_in_float32(variant: BodyVariant) -> None:
    """Like float16: the body casts its inputs to float32 first, and the result last, whatever the type."""
    body = NODES[0].body(variant)
    turned = {node.output[0]: node.input[0] for node in body.node if node.op_type == "Transpose"}

    def state(name: str) -> str:
        return turned.get(name, name)

    casts = {state(node.input[0]): node.attribute[0].i for node in body.node if node.op_type == "Cast"}
    assert {casts[name] for name in ("query", "key", "value", "projection")} == {onnx.TensorProto.FLOAT}
    typed = [state(node.input[1]) for node in nodes_within(body) if node.op_type == "CastLike"]
    assert typed == ["query"]


@each_variant
def test_nodes_that_differ_share_a_model(variant: BodyVariant) -> None:
    nodes = (NODES[0], NODES[1], replace(NODES[0], epsilon=0.01))
    model, inputs = chain_of(nodes, variant), inputs_of(NODES[0], token_kinds("right", 131))
    exact: dict[str, np.ndarray] = dict(inputs)
    for node in nodes:
        exact["query"] = exact_answer(node, exact)
    assert len(model.functions) == 2
    assert_close(run(new_session(model), inputs), exact["query"], atol=1e-5)


# Wrong answers are found.


@each_node
def test_the_measure_of_bodies_refuses_wrong_answers(node: Favor) -> None:
    inputs = inputs_of(node, token_kinds("right", 331))
    assert_right(node, exact_answer(node, inputs).astype(node.dtype), inputs)
    wrong = [exact_answer(other, inputs) for other in wrong_nodes(node)]
    wrong.append(exact_answer(node, inputs, scale=1.05 * node.head_dim**-0.5))
    if node.features > 1:
        (projection,) = node.constants.values()
        turned = torch.from_numpy(np.roll(projection, 1, axis=1))
        wrong.append(exact_answer(node, inputs, projection=turned))
    for answer in wrong:
        with pytest.raises(AssertionError):
            assert_right(node, answer.astype(node.dtype), inputs)


HARMLESS = {BodyVariant.BATCHED: {}, BodyVariant.BLOCKWISE: {"Min 0": "one chunk holds the whole text"}}
"""Order -> mistakes that change no answer, and the reason."""


@each_variant
def test_a_wrong_body_is_found(variant: BodyVariant) -> None:
    inputs = inputs_of(NODES[0], token_kinds("right", 331))
    unnoticed = unnoticed_mistakes(
        chain_of([NODES[0]], variant), lambda session: assert_right(NODES[0], run(session, inputs), inputs)
    )
    assert unnoticed == [*HARMLESS[variant]]


@each_variant
@pytest.mark.parametrize("counts", [True, False])
def test_a_body_of_the_other_mode_is_found(counts: bool, variant: BodyVariant) -> None:
    node = replace(NODES[0], compat=int(counts))
    inputs = inputs_of(node, token_kinds("holes", 331))
    got = answer_of_body(replace(node, compat=1 - node.compat), variant, inputs)
    with pytest.raises(AssertionError):
        assert_right(node, got, inputs)


# The nodes of a body.


@each_variant
def test_a_body_is_of_standard_operators_that_tensorrt_takes(variant: BodyVariant) -> None:
    forbidden = {"NonZero", "ScatterND", "ScatterElements", "TopK", "EyeLike", "Compress", "Unique"}
    is_blockwise = variant is BodyVariant.BLOCKWISE
    for node in NODES:
        counts = operators_of(node.body(variant))
        assert not forbidden & set(counts), str(node)
        assert counts["MatMul"] + counts["Gemm"] == (4 if is_blockwise else 5), str(node)
        assert (counts["Exp"], counts["Softmax"]) == (2 + is_blockwise, 0), str(node)
        assert counts["Scan"] == (3 if is_blockwise else 0), str(node)
        assert counts["Transpose"] == (2 if is_blockwise else 7), str(node)


def test_bodies_that_differ_have_names_that_differ() -> None:
    assert [node.body().name for node in NODES[:2]] == ["FavorAttention", "FavorAttention_compat"]
    node = NODES[1]
    body = function_of_node(node.operator, inputs=5, attributes=node.node_attributes, variant=BodyVariant.BLOCKWISE)
    assert body.name == "FavorAttention_compat"


# Memory, measured in processes of their own.


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc, which Linux has")
def test_memory_is_linear_in_tokens_and_holds_the_features_of_no_head(tmp_path: Path) -> None:
    """In the batched variant, the features of 4096 tokens take 67 MB, of queries and of keys."""
    node, growth = replace(WIDE, features=1024), dict[BodyVariant, list[int]]()
    for variant in BodyVariant:
        path = tmp_path / f"{variant.value}.onnx"
        onnx.save(chain_of([node], variant), path)
        growth[variant] = growths_bytes(path, 2048, 4096)
    result_bytes, feature_bytes = 4096 * 4 * 64 * 4, 4096 * 4 * 1024 * 4
    for short, long in growth.values():
        assert long > result_bytes, "less than the result: nothing was measured"
        assert long <= 2.2 * short
    assert growth[BodyVariant.BLOCKWISE][1] < 0.5 * feature_bytes
    assert growth[BodyVariant.BATCHED][1] > feature_bytes


def all_scores_bytes(node: Any) -> int:
    """The bytes of all scores of two texts of 8192 tokens."""
    return 2 * node.heads * 8192 * 8192 * 4


def test_tensorrt_rtx_builds_a_body_without_the_scores_of_all_tokens(tmp_path: Path) -> None:
    node = replace(WIDE, dtype="float16")
    (planned_for_long,) = planned_bytes(chain_of([node]), tmp_path, 8192, profiles=1)
    assert 0 < planned_for_long < all_scores_bytes(node) / 4


@pytest.mark.nightly
@pytest.mark.parametrize(
    "node",
    [
        replace(WIDE, dtype="float16"),
        replace(WIDE, compat=1),
        replace(WIDE, dtype="bfloat16"),
    ],
    ids=str,
)
def test_tensorrt_rtx_plans_memory_linear_in_tokens_for_every_form(node: Favor, tmp_path: Path) -> None:
    short_bytes, long_bytes = planned_bytes(chain_of([node]), tmp_path, 4096, 8192)
    assert 0 < short_bytes < long_bytes < all_scores_bytes(node) / 4
    assert long_bytes <= 2.1 * short_bytes
