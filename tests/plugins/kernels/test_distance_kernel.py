"""The GPU kernels of attention by distance, clipped and relative, interpreted on the CPU, against the definitions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hdplugins.attention.plugin_spec import plugin_spec_of
from hdplugins.kernels.block_config import HEAD_DIMS, BlockConfig
from support.attention_layers import PADDINGS, token_kinds
from support.comparators import assert_as_accurate, named_case
from support.exact_answers import exact_answer
from support.interpreted_kernel import Inputs, Interpreter
from support.kernel_cases import answer_of_gpu
from support.operators import distance, relative
from support.operators.distance import Clipped, wrong_inputs
from support.operators.relative import NODES, Relative, key_kinds, wrong_nodes

pytest.importorskip("triton", reason="the kernel is written in Triton, which has no wheel for this platform")

Node = Clipped | Relative

SQUARE, WIDE, TALL = BlockConfig(16, 16, 4, 2, 32), BlockConfig(16, 64, 4, 2, 32), BlockConfig(64, 16, 4, 2, 32)
"""Small tiles: texts of a few tokens then have several."""

CLIPPED = (
    Clipped(heads=1),
    Clipped(by_query=True, values=True, heads=2),
    Clipped(reach=16, values=True, heads=1, dtype="float16"),
    Clipped(reach=18, by_query=True, heads=1, head_dim=80),
    Clipped(reach=1, by_query=True, values=True, heads=1, head_dim=80),
    Clipped(reach=100, by_query=True, values=True, heads=1),
)
"""Of reaches below a tile, of a tile, above it, and above all texts; at 18, a far tile too many shows."""


def kinds_of(node: Node, padding: str, tokens: int, memory: int = 0, batch: int = 3) -> np.ndarray:
    """[batch, keys]."""
    if isinstance(node, Clipped):
        return token_kinds(padding, tokens, batch=batch)
    return key_kinds(padding, tokens, memory, batch=batch)


def tensors(node: Node, kinds: np.ndarray, tokens: int | None = None, *, size: float = 1.0) -> Inputs:
    """The inputs of a node; NaN in keys and values of padding, and in the numbers of distances that no text has."""
    tokens = kinds.shape[1] if tokens is None else tokens
    arrays = (
        distance.inputs_of(node, kinds)
        if isinstance(node, Clipped)
        else relative.inputs_of(node, kinds, tokens, spare=3)
    )
    made = {name: torch.from_numpy(array) for name, array in arrays.items()}
    made["query"] *= size
    is_padding = torch.from_numpy(kinds == 0)[:, :, None, None]
    for name in ("key", "value"):
        made[name] = made[name].masked_fill(is_padding, torch.nan)
    if isinstance(node, Clipped):
        is_far = torch.arange(-node.reach, node.reach + 1).abs() >= tokens
        made["scores_by_distance"] = made["scores_by_distance"].masked_fill(is_far, torch.nan)
    else:
        # Queries of padding answer 0, whatever they are.
        made["query"] = made["query"].masked_fill(is_padding[:, -tokens:], torch.nan)
        made["positions"][:, node.distances(tokens, kinds.shape[1]) :] = torch.nan
    return made


def right_answer(node: Node, inputs: Inputs, dtype: str = "float64") -> torch.Tensor:
    arrays = {name: tensor if tensor.dtype == torch.bool else tensor.nan_to_num() for name, tensor in inputs.items()}
    numbers = {name: tensor.numpy() for name, tensor in arrays.items()}
    return torch.from_numpy(exact_answer(node, numbers, getattr(torch, dtype)))


def answer_of(interpreter: Interpreter, node: Node, inputs: Inputs, block_config: BlockConfig = SQUARE) -> torch.Tensor:
    block_config = replace(block_config, block_d=32 if node.head_dim == 32 else 64)
    return interpreter.attention(
        node.operator.name, inputs, block_config=block_config, attributes=node.node_attributes
    )[0]


def check(interpreter: Interpreter, node: Node, inputs: Inputs, block_config: BlockConfig = SQUARE) -> torch.Tensor:
    """The answer, which is right."""
    actual = answer_of(interpreter, node, inputs, block_config)
    assert_as_accurate(actual, right_answer(node, inputs), right_answer(node, inputs, node.dtype))
    return actual


def pairwise(nodes: Sequence[Node], sizes: Sequence[tuple[int, int]]) -> list[Any]:
    """Each node, size and padding; hypothesis draws others below."""
    return [
        pytest.param(node, *size, padding, id=f"{type(node).__name__} {size[0]} and {size[1]}, padding {padding}")
        for node, size, padding in zip(itertools.cycle(nodes), sizes, itertools.cycle(PADDINGS), strict=False)
    ]


@pytest.mark.parametrize(
    ("node", "memory", "tokens", "padding"),
    [
        # One tile and several, tiles that are full, and one more or less.
        *pairwise(CLIPPED, [(0, 61), (0, 17), (0, 1), (0, 16), (0, 38), (0, 15), (0, 33)]),
        *pairwise(NODES, [(0, 1), (64, 17), (7, 15), (1, 16), (0, 37), (7, 61), (1, 1), (16, 31)]),
    ],
)
def test_a_kernel_gives_the_right_answer(
    node: Node, memory: int, tokens: int, padding: str, interpreter: Interpreter
) -> None:
    """Clipped, padding's queries have theirs; texts without a real token have 0, which the comparison demands."""
    kinds = kinds_of(node, padding, tokens, memory)
    actual = check(interpreter, node, tensors(node, kinds, tokens))
    if isinstance(node, Relative):
        is_padding = torch.from_numpy(kinds[:, -tokens:] == 0)
        assert (actual[is_padding] == 0).all()


@pytest.mark.parametrize(
    ("node", "tokens", "block_config"),
    [
        *((Clipped(reach=16, by_query=True, values=True, heads=1), 150, block_config) for block_config in (WIDE, TALL)),
        (NODES[3], 37, WIDE),
    ],
    ids=["clipped, wide", "clipped, tall", "relative, wide"],
)
def test_tiles_may_have_more_keys_than_queries_or_fewer(
    node: Node, tokens: int, block_config: BlockConfig, interpreter: Interpreter
) -> None:
    check(interpreter, node, tensors(node, kinds_of(node, "holes", tokens, 64, batch=1), tokens), block_config)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        pytest.param(*case, marks=[] if case == (96, "float16") else [pytest.mark.nightly])
        for case in itertools.product(HEAD_DIMS, ("float32", "float16"))
    ],
)
def test_heads_of_every_size_give_the_right_answers_with_the_tiles_of_a_gpu(
    head_dim: int, dtype: str, interpreter: Interpreter
) -> None:
    """Not bfloat16: Triton's interpreter (3.7.1 and 3.9.0) multiplies its bit patterns as integers."""
    head = {"heads": 1, "head_dim": head_dim, "dtype": dtype}
    clipped = [Clipped(**head, reach=20, values=values) for values in (True, False)]
    nodes: list[Node] = [*clipped, Relative(**head, causal=1, reach=70)]
    for node in nodes:
        inputs, spec = tensors(node, kinds_of(node, "right", 110, 40, batch=1), 110), plugin_spec_of(node.operator)
        shapes = [tuple(tensor.shape) for tensor in inputs.values()]
        block_config = spec.block_config(shapes, node.node_attributes, dtype=dtype, architecture=86)
        actual = interpreter.attention(
            node.operator.name, inputs, block_config=block_config, attributes=node.node_attributes
        )[0]
        with named_case(node):
            assert_as_accurate(actual, right_answer(node, inputs), right_answer(node, inputs, dtype))


@pytest.mark.parametrize("node", [Clipped(by_query=True, values=True, heads=1), Relative()], ids=str)
def test_scores_far_beyond_exp_give_the_right_answers(node: Node, interpreter: Interpreter) -> None:
    check(interpreter, node, tensors(node, kinds_of(node, "holes", 33, 16, batch=1), 33, size=1000))


def test_queries_of_padding_leave_the_others_alone(interpreter: Interpreter) -> None:
    """NaN in them, and so in their numbers, is in their own clipped answers, which nobody reads."""
    node = Clipped(by_query=True, values=True, heads=1, reach=9)
    kinds = token_kinds("left", 38, batch=2)
    inputs = dict(tensors(node, kinds))
    right, pytorch = right_answer(node, inputs), right_answer(node, inputs, "float32")
    is_padding = torch.from_numpy(kinds == 0)
    for name in ("query", "scores_by_distance"):
        inputs[name] = inputs[name].masked_fill(is_padding[:, :, None, None], torch.nan)
    actual = answer_of(interpreter, node, inputs)
    assert torch.isnan(actual[is_padding]).all()
    real = ~is_padding
    assert_as_accurate(actual[real], right[real], pytorch[real])


@settings(max_examples=4, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    row=st.lists(st.sampled_from([0, 1, 1, 1]), min_size=1, max_size=70),
    node=st.builds(Clipped, heads=st.just(1), reach=st.integers(1, 50), by_query=st.booleans(), values=st.booleans()),
    block_config=st.sampled_from([SQUARE, WIDE, TALL, BlockConfig(32, 32, 4, 2, 32)]),
)
def test_any_reach_and_any_mask_give_the_right_answer(
    row: list[int], node: Clipped, block_config: BlockConfig, interpreter: Interpreter
) -> None:
    inputs = tensors(node, np.array([row], np.int32))
    # A text of few real tokens has too few values to show what rounding does.
    long = tensors(node, token_kinds("none", 211, batch=1))
    usual_error = (right_answer(node, long, "float32") - right_answer(node, long)).abs().max()
    right = right_answer(node, inputs)
    assert_as_accurate(answer_of(interpreter, node, inputs, block_config), right, (right + usual_error).float())


@settings(max_examples=5, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    # Fewer tokens have too few values to show what rounding does.
    kinds=st.lists(st.sampled_from([0, 1, 1, 2, 3]), min_size=24, max_size=80).filter(
        lambda kinds: np.count_nonzero(kinds) >= 16
    ),
    memory=st.integers(0, 70),
    node=st.builds(
        Relative, heads=st.just(1), causal=st.integers(0, 1), reach=st.integers(0, 40), segments=st.booleans()
    ),
    block_config=st.sampled_from([SQUARE, WIDE, BlockConfig(32, 32, 4, 2, 32)]),
)
def test_any_kinds_of_keys_give_the_right_answers(
    kinds: list[int], memory: int, node: Relative, block_config: BlockConfig, interpreter: Interpreter
) -> None:
    tokens = len(kinds) - min(memory, len(kinds) - 8)
    check(interpreter, node, tensors(node, np.array([kinds], np.int32), tokens), block_config)


@pytest.mark.parametrize(
    ("node", "unseen", "queries_without", "queries_with"),
    [
        # Of 16 remembered tokens and 64: the tile of the first 16 queries sees the keys 0 to 31.
        (Relative(causal=1), slice(32, None), slice(0, 16), slice(16, None)),
        # The tile of the queries 48 to 63 sees the keys from 64 - 8 on.
        (Relative(reach=9), slice(0, 56), slice(48, None), slice(0, 40)),
    ],
    ids=["behind", "too far"],
)
def test_keys_that_no_query_sees_are_not_loaded(
    node: Relative, unseen: slice, queries_without: slice, queries_with: slice, interpreter: Interpreter
) -> None:
    inputs = tensors(node, np.ones((1, 80), np.int32), 64)
    right, pytorch = right_answer(node, inputs), right_answer(node, inputs, "float32")
    for name in ("key", "value"):
        inputs[name][:, unseen] = torch.nan
    actual = answer_of(interpreter, node, inputs)
    assert_as_accurate(*(answer[:, queries_without] for answer in (actual, right, pytorch)))
    assert torch.isnan(actual[:, queries_with]).all()


def test_the_comparison_refuses_the_answers_by_other_inputs_and_nodes(interpreter: Interpreter) -> None:
    clipped = Clipped(by_query=True, values=True, heads=1)
    arrays = distance.inputs_of(clipped, token_kinds("holes", 15, batch=2))
    inputs: Inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    right, pytorch = right_answer(clipped, inputs), right_answer(clipped, inputs, clipped.dtype)
    for wrong in wrong_inputs(clipped, arrays):
        actual = answer_of(interpreter, clipped, {name: torch.from_numpy(array) for name, array in wrong.items()})
        with pytest.raises(AssertionError):
            assert_as_accurate(actual, right, pytorch)
    relative = NODES[4]
    dense = replace(relative, causal=0)  # for which there are positions for every node
    inputs = tensors(dense, key_kinds("none", 37, 40, batch=1), 37)
    right, pytorch = right_answer(relative, inputs), right_answer(relative, inputs, relative.dtype)
    for other in wrong_nodes(relative):
        names = (*other.operator.state_names, *other.inputs)
        given = {name: tensor for name, tensor in inputs.items() if name in names}
        with named_case(other), pytest.raises(AssertionError):
            assert_as_accurate(answer_of(interpreter, other, given), right, pytorch)


@pytest.mark.gpu
@pytest.mark.parametrize("node", [*CLIPPED, Clipped(reach=128, head_dim=64), *NODES], ids=str)
def test_a_gpu_gives_the_right_answers(node: Node) -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        node = replace(node, dtype="float32")  # which NumPy has
        inputs = tensors(node, kinds_of(node, "right", 700, 333), 700)
        typed = {name: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
                 for name, tensor in inputs.items()}  # fmt: skip
        exact = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in typed.items()}
        actual = answer_of_gpu(node.operator, typed, node.node_attributes)
        with named_case(dtype):
            # NumPy has no bfloat16.
            pytorch = right_answer(node, exact, dtype).to(actual.dtype)
            assert_as_accurate(actual, right_answer(node, exact), pytorch)


# Launches.


def clipped_shapes(
    *, batch: int = 2, heads: int = 12, tokens: int = 512, head_dim: int = 64, reach: int = 64
) -> dict[str, Any]:
    state, rows = (batch, tokens, heads, head_dim), 2 * reach + 1
    return {
        **dict.fromkeys(("query", "key", "value"), state),
        "key_mask": (batch, tokens),
        "scores_by_distance": (batch, tokens, heads, rows),
        "values_by_distance": (rows, head_dim),
    }


def relative_shapes(
    *, batch: int = 2, heads: int = 12, tokens: int = 512, keys: int = 896, head_dim: int = 64
) -> dict[str, Any]:
    return {
        "query": (batch, tokens, heads, head_dim),
        **dict.fromkeys(("key", "value"), (batch, keys, heads, head_dim)),
        "key_kind": (batch, keys),
        "positions": (heads, keys + tokens - 1, head_dim),
        **dict.fromkeys(("content_bias", "position_bias"), (heads, head_dim)),
        "segment_scores": (batch, tokens, heads),
    }


FITTING: dict[type[Node], tuple[Node, dict[str, Any]]] = {
    Clipped: (Clipped(reach=64, head_dim=64), clipped_shapes()),
    Relative: (Relative(head_dim=64), relative_shapes()),
}

REFUSED: list[tuple[type[Node], dict[str, Any], str]] = [
    (Clipped, {"reach": 0}, "reach is 0; it must be 1 or more"),
    (Clipped, {"reach": 63}, "scores_by_distance has 129 distances; a reach of 63 has 127"),
    (Clipped, {"scale": 0.0}, "scale is 0.0; the kernels need a finite one greater than 0"),
    (Clipped, {"scores_by_distance": (3, 512, 12, 129)}, r"is \[3, 512, 12, 129\]; .* \[1 or 2, 1 or 512,"),
    (Clipped, {"scores_by_distance": (512, 12, 129)}, r"scores_by_distance is \[512, 12, 129\]; with a query"),
    (Clipped, {"values_by_distance": (127, 64)}, r"values_by_distance is \[127, 64\]; .* it is \[129, 64\]"),
    (Clipped, {"value": (2, 511, 12, 64)}, r"the first three are alike, \[batch, tokens, heads, head_dim\]"),
    (Clipped, {"key_mask": (2, 511)}, r"key_mask is \[2, 511\]; the first three"),
    (Clipped, dict.fromkeys(("scores_by_distance", "values_by_distance")), "Attention has 5 or 6 inputs, not 4"),
    (Clipped, clipped_shapes(tokens=0), "tokens is 0; it must be 1 or more"),
    (Clipped, clipped_shapes(head_dim=48), "not support head_dim 48; they support 32, 64, 80, 96, 128"),
    (Clipped, clipped_shapes(batch=2**16), "too large for one launch: batch and heads"),
    (
        Clipped,
        clipped_shapes(tokens=2**20, reach=2**10) | {"reach": 2**10},
        "too large for one launch: the scores of a sequence",
    ),
    (Relative, {"causal": 2}, "causal is 2; it must be 0 or 1"),
    (Relative, {"reach": -1}, "reach is -1; it must be 0 or more"),
    (Relative, {"positions": (12, 1406, 64)}, "positions has 1406 distances; 1407 are needed"),
    (Relative, {"positions": (12, 895, 64), "causal": 1}, "positions has 895 distances; 896 are needed"),
    (Relative, {"key": (2, 896, 12)}, r"query is \[2, 512, 12, 64\] and key is \[2, 896, 12\]; both have four axes"),
    (Relative, {"value": (2, 512, 12, 64)}, r"value is \[2, 512, 12, 64\]; .* it is \[2, 896, 12, 64\]"),
    (Relative, {"key_kind": (2, 512)}, r"key_kind is \[2, 512\]; .* it is \[2, 896\]"),
    (Relative, {"content_bias": (64,)}, r"content_bias is \[64\]; .* it is \[12, 64\]"),
    (Relative, {"segment_scores": (2, 896, 12)}, r"segment_scores is \[2, 896, 12\]; .* it is \[2, 512, 12\]"),
    (Relative, dict.fromkeys(("position_bias", "segment_scores")), "RelativeAttention has 7 or 8 inputs, not 6"),
    (
        Relative,
        relative_shapes(keys=511),
        "There are 511 keys for 512 tokens; keys must include the tokens of the sequence",
    ),
    (Relative, relative_shapes(batch=2**16), "too large for one launch"),
]
"""Attributes and shapes, None without the input -> what is said of them."""


def test_what_cannot_be_launched_is_refused() -> None:
    for kind, changes, message in REFUSED:
        node, fitting = FITTING[kind]
        attributes = {name: changes.get(name, value) for name, value in node.node_attributes.items()}
        shapes = [shape for name, own in fitting.items() if (shape := changes.get(name, own)) is not None]
        with named_case(message), pytest.raises(ValueError, match=message):
            plugin_spec_of(node.operator).check(shapes, attributes)


def test_axes_that_vary_may_be_1_in_a_check() -> None:
    for kind, shapes in ((Clipped, clipped_shapes(batch=1, tokens=1)), (Relative, relative_shapes(tokens=1, keys=1))):
        node, _ = FITTING[kind]
        plugin_spec_of(node.operator).check(list(shapes.values()), node.node_attributes)


def test_numbers_that_texts_or_queries_share_are_not_stepped_over() -> None:
    node, fitting = FITTING[Clipped]
    spec, attributes = plugin_spec_of(node.operator), node.node_attributes
    for table, steps in (
        ((1, 1, 12, 129), (0, 129, 0)),
        ((2, 1, 12, 129), (12 * 129, 129, 0)),
        ((1, 512, 12, 129), (0, 129, 12 * 129)),
    ):
        shapes = list((fitting | {"scores_by_distance": table}).values())
        constants = spec.constants(shapes, attributes, dtype="float16", block_config=BlockConfig(32, 64, 8, 2, 64))
        (launch,) = spec.launches(shapes, attributes, constants=constants)
        assert tuple(launch.scalars[name] for name in ("bias_batch", "bias_head", "bias_query")) == steps


@pytest.mark.parametrize(
    ("node", "other"),
    [
        (Clipped(), {"scores_by_distance": torch.float16, "key_mask": torch.int32}),
        (Relative(), {"positions": torch.float16, "key_kind": torch.int64}),
    ],
    ids=["clipped", "relative"],
)
def test_tensors_of_another_dtype_are_refused(
    node: Node, other: dict[str, torch.dtype], interpreter: Interpreter
) -> None:
    inputs = tensors(node, kinds_of(node, "none", 20, 5), 20)
    for name, dtype in other.items():
        with pytest.raises(ValueError, match=f"{name} is {dtype} .* torch.*, contiguous"):
            answer_of(interpreter, node, {**inputs, name: inputs[name].to(dtype)})
