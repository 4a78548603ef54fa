"""The GPU kernel of relative attention, interpreted on the CPU, against the definition."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hdplugins.kernels.attention_tiles import HEAD_DIMS, Tiles
from hdplugins.operators.plugin_face import face_of
from hdplugins.operators.relative_attention.tiles import tiles_for_distances
from support.comparators import assert_as_accurate, named_case
from support.exact_answers import exact_answer
from support.interpreted_kernel import Inputs, Interpreter
from support.kernel_cases import answer_of_gpu
from support.relative_operator import NODES, Relative, inputs_of, key_kinds, wrong_nodes
from support.sparse_operators import PADDINGS

pytest.importorskip("triton", reason="the kernel is written in Triton, which has no wheel for this platform")

FACE = face_of(Relative.operator)
SQUARE, WIDE = Tiles(16, 16, 4, 2, 32), Tiles(16, 64, 4, 2, 32)
"""Small tiles: texts of a few tokens then have several."""

SIZES = ((0, 1), (64, 17), (7, 15), (1, 16), (0, 37), (7, 61), (1, 1), (16, 31))
"""(tokens of the memory, tokens): one tile and several, tiles that are full, and one more or less."""


def tensors(node: Relative, kinds: np.ndarray, tokens: int, *, size: float = 1.0) -> Inputs:
    """The inputs of a node; NaN wherever there is padding, and in rows of the positions that are not needed."""
    made = {name: torch.from_numpy(array) for name, array in inputs_of(node, kinds, tokens, spare=3).items()}
    made["query"] *= size
    is_padding = made["key_kind"] == 0
    for name, hidden in (("query", is_padding[:, -tokens:]), ("key", is_padding), ("value", is_padding)):
        made[name] = made[name].masked_fill(hidden[:, None, :, None], torch.nan)
    made["positions"][:, node.distances(tokens, kinds.shape[1]) :] = torch.nan
    return made


def right_answer(node: Relative, inputs: Inputs, dtype: str = "float64") -> torch.Tensor:
    arrays = {name: tensor.nan_to_num().numpy() for name, tensor in inputs.items()}
    return torch.from_numpy(exact_answer(node, arrays, getattr(torch, dtype)))


def tiles_of(node: Relative, tiles: Tiles) -> Tiles:
    """The same tiles with the head cut for the node's head_dim."""
    return replace(tiles, head=32 if node.head_dim == 32 else 64)


def answer_of(interpreter: Interpreter, node: Relative, inputs: Inputs, tiles: Tiles = SQUARE) -> torch.Tensor:
    attributes = node.node_attributes
    return interpreter.attention(node.operator.name, inputs, tiles=tiles_of(node, tiles), attributes=attributes)[0]


def check(interpreter: Interpreter, node: Relative, inputs: Inputs, tiles: Tiles = SQUARE) -> torch.Tensor:
    """The answer, which is right."""
    actual = answer_of(interpreter, node, inputs, tiles)
    assert_as_accurate(actual, right_answer(node, inputs), right_answer(node, inputs, node.dtype))
    return actual


PAIRWISE = [
    pytest.param(NODES[place % len(NODES)], *size, padding, id=f"{size[0]} and {size[1]} tokens, padding {padding}")
    for place, (size, padding) in enumerate(zip(SIZES, itertools.cycle(PADDINGS), strict=False))
]
"""Each node, size and padding; hypothesis draws others below."""


@pytest.mark.parametrize(("node", "memory", "tokens", "padding"), PAIRWISE)
def test_the_kernel_gives_the_right_answer(
    node: Relative, memory: int, tokens: int, padding: str, interpreter: Interpreter
) -> None:
    inputs = tensors(node, key_kinds(padding, tokens, memory), tokens)
    actual = check(interpreter, node, inputs)
    is_padding = inputs["key_kind"][:, -tokens:] == 0
    assert (actual.masked_select(is_padding[:, None, :, None]) == 0).all()


def test_tiles_may_have_more_keys_than_queries(interpreter: Interpreter) -> None:
    node = NODES[3]
    check(interpreter, node, tensors(node, key_kinds("holes", 37, 64, batch=1), 37), WIDE)


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
    """Not bfloat16: Triton 3.9's interpreter multiplies its bit patterns as integers."""
    node = Relative(heads=1, head_dim=head_dim, dtype=dtype, causal=1, reach=70)
    inputs = tensors(node, key_kinds("right", 70, 40, batch=1), 70)
    tiles = tiles_for_distances(86, head_dim, dtype)
    actual = interpreter.attention(node.operator.name, inputs, tiles=tiles, attributes=node.node_attributes)[0]
    assert_as_accurate(actual, right_answer(node, inputs), right_answer(node, inputs, dtype))


def test_scores_far_beyond_exp_give_the_right_answers(interpreter: Interpreter) -> None:
    node = Relative()
    check(interpreter, node, tensors(node, key_kinds("holes", 33, 16, batch=1), 33, size=1000))


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    # Shorter texts have too few values to show what rounding does.
    kinds=st.lists(st.sampled_from([0, 1, 1, 2, 3]), min_size=16, max_size=80),
    memory=st.integers(0, 70),
    node=st.builds(
        Relative, heads=st.just(1), causal=st.integers(0, 1), reach=st.integers(0, 40), segments=st.booleans()
    ),
    tiles=st.sampled_from([SQUARE, WIDE, Tiles(32, 32, 4, 2, 32)]),
)
def test_any_kinds_of_keys_give_the_right_answers(
    kinds: list[int], memory: int, node: Relative, tiles: Tiles, interpreter: Interpreter
) -> None:
    tokens = len(kinds) - min(memory, len(kinds) - 8)
    check(interpreter, node, tensors(node, np.array([kinds], np.int32), tokens), tiles)


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
        inputs[name][:, :, unseen] = torch.nan
    actual = answer_of(interpreter, node, inputs)
    assert_as_accurate(*(answer[:, :, queries_without] for answer in (actual, right, pytorch)))
    assert torch.isnan(actual[:, :, queries_with]).all()


def test_the_comparison_refuses_the_answers_of_other_nodes(interpreter: Interpreter) -> None:
    node = NODES[4]
    dense = replace(node, causal=0)  # for which there are positions for every node
    inputs = tensors(dense, key_kinds("none", 37, 40, batch=1), 37)
    right, pytorch = right_answer(node, inputs), right_answer(node, inputs, node.dtype)
    for wrong in wrong_nodes(node):
        names = (*wrong.operator.state_names, *wrong.inputs)
        given = {name: tensor for name, tensor in inputs.items() if name in names}
        with named_case(wrong), pytest.raises(AssertionError):
            assert_as_accurate(answer_of(interpreter, wrong, given), right, pytorch)


@pytest.mark.gpu
@pytest.mark.parametrize("node", NODES, ids=str)
def test_a_gpu_gives_the_right_answers(node: Relative) -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        node = replace(node, dtype="float32")  # which NumPy has
        inputs = tensors(node, key_kinds("right", 700, 333), 700)
        typed = {name: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
                 for name, tensor in inputs.items()}  # fmt: skip
        exact = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in typed.items()}
        actual = answer_of_gpu(node.operator, typed, node.node_attributes)
        with named_case(dtype):
            assert_as_accurate(actual, right_answer(node, exact), right_answer(node, exact, dtype))


# Launches.


def shapes_of(
    *, batch: int = 2, heads: int = 12, tokens: int = 512, keys: int = 896, head_dim: int = 64, spare: int = 0
) -> dict[str, tuple[int, ...]]:
    return {
        "query": (batch, heads, tokens, head_dim),
        "key": (batch, heads, keys, head_dim),
        "value": (batch, heads, keys, head_dim),
        "key_kind": (batch, keys),
        "positions": (heads, keys + tokens - 1 + spare, head_dim),
        "content_bias": (heads, head_dim),
        "position_bias": (heads, head_dim),
        "segment_scores": (batch, heads, tokens),
    }


ATTRIBUTES = Relative(head_dim=64).node_attributes


def test_what_cannot_be_launched_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"causal": 2}, "causal is 2; it must be 0 or 1"),
        ({"reach": -1}, "reach is -1; it must be 0 or more"),
        ({"scale": 0.0}, "scale is 0.0; the kernels need a finite one greater than 0"),
        ({"positions": (12, 1406, 64)}, "positions has 1406 distances; 1407 are needed"),
        ({"positions": (12, 895, 64), "causal": 1}, "positions has 895 distances; 896 are needed"),
        ({"key": (2, 12, 896)}, r"query is \[2, 12, 512, 64\] and key is \[2, 12, 896\]; both have four axes"),
        ({"value": (2, 12, 512, 64)}, r"value is \[2, 12, 512, 64\]; .* it is \[2, 12, 896, 64\]"),
        ({"key_kind": (2, 512)}, r"key_kind is \[2, 512\]; .* it is \[2, 896\]"),
        ({"content_bias": (64,)}, r"content_bias is \[64\]; .* it is \[12, 64\]"),
        ({"segment_scores": (2, 12, 896)}, r"segment_scores is \[2, 12, 896\]; .* it is \[2, 12, 512\]"),
        ({"position_bias": None}, "RelativeAttention has 7 or 8 inputs, not 6"),
        (shapes_of(keys=511), "There are 511 keys for 512 tokens; the text's own must be among them"),
        (shapes_of(tokens=0), "tokens is 0; it must be 1 or more"),
        (shapes_of(head_dim=48), "not support head_dim 48; they support 32, 64, 80, 96, 128"),
        (shapes_of(batch=2**16), "too large for one launch"),
    ]
    for changes, message in cases:
        given = ATTRIBUTES | {name: value for name, value in changes.items() if name in ATTRIBUTES}
        shapes = shapes_of() | {name: value for name, value in changes.items() if name not in ATTRIBUTES}
        if shapes["position_bias"] is None:
            del shapes["position_bias"], shapes["segment_scores"]
        with named_case(changes), pytest.raises(ValueError, match=message):
            FACE.check(list(shapes.values()), given)


def test_axes_that_vary_may_be_1_in_a_check() -> None:
    FACE.check(list(shapes_of(batch=1, tokens=1, keys=1).values()), ATTRIBUTES)


def test_tensors_of_another_dtype_are_refused(interpreter: Interpreter) -> None:
    node = Relative()
    inputs = dict(tensors(node, key_kinds("none", 20, 5), 20))
    for name, tensor in (("positions", inputs["positions"].half()), ("key_kind", inputs["key_kind"].long())):
        with pytest.raises(ValueError, match=f"{name} is torch.{str(tensor.dtype)[6:]} .* contiguous torch."):
            answer_of(interpreter, node, {**inputs, name: tensor})
