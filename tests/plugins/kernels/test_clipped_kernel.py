"""The GPU kernel of attention by clipped distance, interpreted on the CPU, against the definition."""

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
from hdplugins.operators.clipped_distance_attention.tiles import tiles_by_distance
from hdplugins.operators.plugin_face import face_of
from support.clipped_operator import Clipped, inputs_of, wrong_inputs
from support.comparators import assert_as_accurate, named_case
from support.exact_answers import exact_answer
from support.interpreted_kernel import Inputs, Interpreter
from support.kernel_cases import answer_of_gpu
from support.sparse_operators import PADDINGS, token_kinds

pytest.importorskip("triton", reason="the kernel is written in Triton, which has no wheel for this platform")

FACE = face_of(Clipped.operator)
SQUARE, WIDE, TALL = Tiles(16, 16, 4, 2, 32), Tiles(16, 64, 4, 2, 32), Tiles(64, 16, 4, 2, 32)
"""Small tiles: texts of a few tokens then have several."""

NODES = (
    Clipped(heads=1),
    Clipped(by_query=True, values=True, heads=2),
    Clipped(reach=16, values=True, heads=1, dtype="float16"),
    Clipped(reach=18, by_query=True, heads=1, head_dim=80),
    Clipped(reach=1, by_query=True, values=True, heads=1, head_dim=80),
    Clipped(reach=100, by_query=True, values=True, heads=1),
)
"""Of reaches below a tile, of a tile, above it, and above all texts; at 18, a far tile too many shows."""

TOKENS = (61, 17, 1, 16, 38, 15, 33)
"""One tile and several, tiles that are full, and one more or less."""


def tensors(node: Clipped, kinds: np.ndarray, *, size: float = 1.0) -> Inputs:
    """The inputs of a node; NaN in keys and values of padding, and in the numbers of distances that no text has."""
    made = {name: torch.from_numpy(array) for name, array in inputs_of(node, kinds).items()}
    made["query"] *= size
    hidden, tokens = torch.from_numpy(kinds == 0)[:, None, :, None], kinds.shape[1]
    for name in ("key", "value"):
        made[name] = made[name].masked_fill(hidden, torch.nan)
    distance = torch.arange(-node.reach, node.reach + 1)
    made["scores_by_distance"] = made["scores_by_distance"].masked_fill(distance.abs() >= tokens, torch.nan)
    return made


def right_answer(node: Clipped, inputs: Inputs, dtype: str = "float64") -> torch.Tensor:
    arrays = {name: tensor if tensor.dtype == torch.bool else tensor.nan_to_num() for name, tensor in inputs.items()}
    return torch.from_numpy(
        exact_answer(node, {name: tensor.numpy() for name, tensor in arrays.items()}, getattr(torch, dtype))
    )


def answer_of(interpreter: Interpreter, node: Clipped, inputs: Inputs, tiles: Tiles = SQUARE) -> torch.Tensor:
    tiles = replace(tiles, head=32 if node.head_dim == 32 else 64)
    return interpreter.attention(node.operator.name, inputs, tiles=tiles, attributes=node.node_attributes)[0]


def check(interpreter: Interpreter, node: Clipped, inputs: Inputs, tiles: Tiles = SQUARE) -> None:
    actual = answer_of(interpreter, node, inputs, tiles)
    assert_as_accurate(actual, right_answer(node, inputs), right_answer(node, inputs, node.dtype))


PAIRWISE = [
    pytest.param(NODES[place % len(NODES)], tokens, padding, id=f"{tokens} tokens, padding {padding}")
    for place, (tokens, padding) in enumerate(zip(TOKENS, itertools.cycle(PADDINGS), strict=False))
]
"""Each node, length and padding; hypothesis draws others below."""


@pytest.mark.parametrize(("node", "tokens", "padding"), PAIRWISE)
def test_the_kernel_gives_the_right_answer(node: Clipped, tokens: int, padding: str, interpreter: Interpreter) -> None:
    """And padding's queries have theirs; texts without a real token have 0, which the comparison demands."""
    check(interpreter, node, tensors(node, token_kinds(padding, tokens)))


@pytest.mark.parametrize("tiles", [WIDE, TALL], ids=["wide", "tall"])
def test_tiles_may_have_more_keys_than_queries_or_fewer(tiles: Tiles, interpreter: Interpreter) -> None:
    node = Clipped(reach=16, by_query=True, values=True, heads=1)
    check(interpreter, node, tensors(node, token_kinds("holes", 150, batch=1)), tiles)


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
    for values in (True, False):
        node = Clipped(heads=1, head_dim=head_dim, dtype=dtype, reach=20, values=values)
        inputs = tensors(node, token_kinds("right", 150, batch=1))
        tiles = tiles_by_distance(86, head_dim, dtype, values=values)
        actual = interpreter.attention(node.operator.name, inputs, tiles=tiles, attributes=node.node_attributes)[0]
        assert_as_accurate(actual, right_answer(node, inputs), right_answer(node, inputs, dtype))


def test_scores_far_beyond_exp_give_the_right_answers(interpreter: Interpreter) -> None:
    node = Clipped(by_query=True, values=True, heads=1)
    check(interpreter, node, tensors(node, token_kinds("holes", 61, batch=1), size=1000))


def test_queries_of_padding_leave_the_others_alone(interpreter: Interpreter) -> None:
    """NaN in them, and so in their numbers, is in their own answers, which nobody reads."""
    node = Clipped(by_query=True, values=True, heads=1, reach=9)
    kinds = token_kinds("left", 38, batch=2)
    inputs = dict(tensors(node, kinds))
    right, pytorch = right_answer(node, inputs), right_answer(node, inputs, "float32")
    is_padding = torch.from_numpy(kinds == 0)
    for name in ("query", "scores_by_distance"):
        inputs[name] = inputs[name].masked_fill(is_padding[:, None, :, None], torch.nan)
    actual = answer_of(interpreter, node, inputs)
    assert torch.isnan(actual[is_padding[:, None]]).all()
    real = ~is_padding[:, None]
    assert_as_accurate(actual[real], right[real], pytorch[real])


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    row=st.lists(st.sampled_from([0, 1, 1, 1]), min_size=1, max_size=70),
    node=st.builds(Clipped, heads=st.just(1), reach=st.integers(1, 50), by_query=st.booleans(), values=st.booleans()),
    tiles=st.sampled_from([SQUARE, WIDE, TALL, Tiles(32, 32, 4, 2, 32)]),
)
def test_any_reach_and_any_mask_give_the_right_answer(
    row: list[int], node: Clipped, tiles: Tiles, interpreter: Interpreter
) -> None:
    inputs = tensors(node, np.array([row], np.int32))
    # A text of few real tokens has too few values to show what rounding does.
    long = tensors(node, token_kinds("none", 211, batch=1))
    usual_error = (right_answer(node, long, "float32") - right_answer(node, long)).abs().max()
    right = right_answer(node, inputs)
    assert_as_accurate(answer_of(interpreter, node, inputs, tiles), right, (right + usual_error).float())


def test_the_comparison_refuses_the_answers_by_other_inputs(interpreter: Interpreter) -> None:
    node = Clipped(by_query=True, values=True, heads=1)
    arrays = inputs_of(node, token_kinds("holes", 15, batch=2))
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    right, pytorch = right_answer(node, inputs), right_answer(node, inputs, node.dtype)
    assert_as_accurate(answer_of(interpreter, node, inputs), right, pytorch)
    for wrong in wrong_inputs(node, arrays):
        actual = answer_of(interpreter, node, {name: torch.from_numpy(array) for name, array in wrong.items()})
        with pytest.raises(AssertionError):
            assert_as_accurate(actual, right, pytorch)


@pytest.mark.gpu
@pytest.mark.parametrize("node", [*NODES, Clipped(reach=128, head_dim=64)], ids=str)
def test_a_gpu_gives_the_right_answers(node: Clipped) -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        node = replace(node, dtype="float32")  # which NumPy has
        inputs = tensors(node, token_kinds("right", 700))
        typed = {name: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
                 for name, tensor in inputs.items()}  # fmt: skip
        exact = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in typed.items()}
        actual = answer_of_gpu(node.operator, typed, node.node_attributes)
        with named_case(dtype):
            assert_as_accurate(actual, right_answer(node, exact), right_answer(node, exact, dtype))


# Launches.


def shapes_of(
    *, batch: int = 2, heads: int = 12, tokens: int = 512, head_dim: int = 64, reach: int = 64, by_query: bool = True
) -> dict[str, tuple[int, ...]]:
    state, rows = (batch, heads, tokens, head_dim), 2 * reach + 1
    return {
        "query": state,
        "key": state,
        "value": state,
        "key_mask": (batch, tokens),
        "scores_by_distance": (batch, heads, tokens, rows) if by_query else (1, heads, 1, rows),
        "values_by_distance": (rows, head_dim),
    }


ATTRIBUTES = Clipped(reach=64, head_dim=64).node_attributes


def launch_of(shapes: dict[str, tuple[int, ...]], **changes: Any) -> Any:
    attributes = ATTRIBUTES | changes
    constants = FACE.constants(list(shapes.values()), attributes, dtype="float16", tiles=Tiles(32, 64, 8, 2, 64))
    (launch,) = FACE.launches(list(shapes.values()), attributes, constants=constants)
    return launch


def test_numbers_that_texts_or_queries_share_are_not_stepped_over() -> None:
    for table, steps in (
        ((1, 12, 1, 129), (0, 129, 0)),
        ((2, 12, 1, 129), (12 * 129, 129, 0)),
        ((1, 12, 512, 129), (0, 512 * 129, 129)),
    ):
        shapes = shapes_of() | {"scores_by_distance": table}
        del shapes["values_by_distance"]
        scalars = launch_of(shapes).scalars
        assert tuple(scalars[name] for name in ("table_batch", "table_head", "table_query")) == steps


def test_what_cannot_be_launched_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"reach": 0}, "reach is 0; it must be 1 or more"),
        ({"reach": 63}, "scores_by_distance has 129 distances; a reach of 63 has 127"),
        ({"scale": 0.0}, "scale is 0.0; the kernels need a finite one greater than 0"),
        (
            {"scores_by_distance": (3, 12, 512, 129)},
            r"is \[3, 12, 512, 129\]; with a query .* \[1 or 2, 12, 1 or 512, ",
        ),
        ({"scores_by_distance": (12, 512, 129)}, r"scores_by_distance is \[12, 512, 129\]; with a query"),
        ({"values_by_distance": (127, 64)}, r"values_by_distance is \[127, 64\]; .* it is \[129, 64\]"),
        ({"value": (2, 12, 511, 64)}, r"the first three are alike, \[batch, heads, tokens, head_dim\]"),
        ({"key_mask": (2, 511)}, r"key_mask is \[2, 511\]; the first three"),
        ({"scores_by_distance": None}, "ClippedDistanceAttention has 5 or 6 inputs, not 4"),
        (shapes_of(tokens=0), "tokens is 0; it must be 1 or more"),
        (shapes_of(head_dim=48), "not support head_dim 48; they support 32, 64, 80, 96, 128"),
        (shapes_of(batch=2**16), "too large for one launch: batch and heads"),
        (shapes_of(tokens=2**20, reach=2**10) | {"reach": 2**10}, "too large for one launch: that of a text has at"),
    ]
    for changes, message in cases:
        given = ATTRIBUTES | {name: value for name, value in changes.items() if name in ATTRIBUTES}
        shapes = shapes_of() | {name: value for name, value in changes.items() if name not in ATTRIBUTES}
        if shapes["scores_by_distance"] is None:
            del shapes["scores_by_distance"], shapes["values_by_distance"]
        with named_case(changes), pytest.raises(ValueError, match=message):
            FACE.check(list(shapes.values()), given)


def test_axes_that_vary_may_be_1_in_a_check() -> None:
    FACE.check(list(shapes_of(batch=1, tokens=1).values()), ATTRIBUTES)


def test_tensors_of_another_dtype_are_refused(interpreter: Interpreter) -> None:
    node = Clipped()
    inputs = dict(tensors(node, token_kinds("none", 20)))
    wrong = {"scores_by_distance": inputs["scores_by_distance"].half(), "key_mask": inputs["key_mask"].int()}
    for name, tensor in wrong.items():
        with pytest.raises(ValueError, match=f"{name} is torch.{str(tensor.dtype)[6:]} .* contiguous torch."):
            answer_of(interpreter, node, {**inputs, name: tensor})
