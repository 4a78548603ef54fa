"""The GPU kernel of sliding-window attention, interpreted on the CPU, against the definition of the operator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hdplugins.kernels.attention_tiles import HEAD_DIMS, Tiles, tiles_for
from hdplugins.operators.sliding_window_attention.geometry import (
    SUMMARY_INTS,
    kernel_sources,
    launches,
    workspace_bytes,
)
from hdplugins.operators.sliding_window_attention.reference import sliding_window_attention
from support.comparators import assert_as_accurate
from support.interpreted_kernel import Interpreter, Texts

pytest.importorskip("triton", reason="the kernel is written in Triton, which has no wheel for this platform")

WINDOW = 16
SMALL = Tiles(block_queries=32, block_keys=16, num_warps=4, num_stages=2, head=32)
"""Small tiles: short texts then have blocks of every sort, at the edges and between them."""

PADDING, LOCAL, GLOBAL = 0, 1, 2
GLOBALS: dict[str, Callable[[int], list[int]]] = {
    "none": lambda tokens: [],
    "first": lambda tokens: [0],
    "scattered": lambda tokens: sorted({0, 3, tokens // 2, tokens // 2 + 1, max(0, tokens - 5)} & set(range(tokens))),
    "all": lambda tokens: list(range(tokens)),
}
PADDINGS: dict[str, Callable[[int], list[int]]] = {
    "none": lambda tokens: [],
    "right": lambda tokens: list(range(tokens - tokens // 3, tokens)),
    "left": lambda tokens: list(range(tokens // 3)),
    "both sides and a hole": lambda tokens: [*range(tokens // 5), tokens // 2, *range(tokens - tokens // 5, tokens)],
    "all": lambda tokens: list(range(tokens)),
}


def kinds(tokens: int, globals_: Sequence[int] = (), padding: Sequence[int] = ()) -> torch.Tensor:
    """[1, tokens]"""
    row = torch.full((1, tokens), LOCAL, dtype=torch.int32)
    row[0, list(globals_)] = GLOBAL
    row[0, list(padding)] = PADDING
    return row


def texts(
    token_kind: torch.Tensor, *, heads: int = 1, head_dim: int = 32, dtype: torch.dtype = torch.float32, size: float = 1
) -> Texts:
    shape = (token_kind.shape[0], heads, token_kind.shape[1], head_dim)
    generator = torch.Generator().manual_seed(math.prod(shape))
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    return Texts(query=(query * size).to(dtype), key=key.to(dtype), value=value.to(dtype), token_kind=token_kind)


def right_answers(given: Texts, *, left: int, right: int, dilation: Sequence[int], scale: float) -> torch.Tensor:
    """float64"""
    query, key, value = (tensor.double() for tensor in (given.query, given.key, given.value))
    return sliding_window_attention(
        query, key, value, given.token_kind, left=left, right=right, dilation=dilation, scale=scale
    )


def answers_of_pytorch(given: Texts, *, left: int, right: int, dilation: Sequence[int], scale: float) -> torch.Tensor:
    """Of PyTorch's fused attention with a dense mask, in the dtype of the texts."""
    heads, tokens = given.query.shape[1:3]
    steps = torch.tensor(list(dilation) * (heads // len(dilation)))[:, None, None]
    offset = torch.arange(tokens) - torch.arange(tokens)[:, None]
    near = (offset >= -left * steps) & (offset <= right * steps) & (offset % steps == 0)
    kind = given.token_kind[:, None, None]
    seen = ((kind == GLOBAL) | ((kind == LOCAL) & near)) & (given.token_kind != PADDING)[:, None, :, None]
    attended = torch.nn.functional.scaled_dot_product_attention(
        given.query, given.key, given.value, attn_mask=seen, scale=scale
    )
    return attended.masked_fill(~seen.any(-1, keepdim=True), 0)


def check(
    interpreter: Interpreter,
    given: Texts,
    *,
    left: int = WINDOW,
    right: int | None = None,
    dilation: Sequence[int] = (1,),
    tiles: Tiles = SMALL,
    global_bound: int | None = None,
) -> None:
    window = {"left": left, "right": left if right is None else right, "dilation": dilation}
    scale = given.query.shape[-1] ** -0.5
    bound = int((given.token_kind == GLOBAL).sum(1).max()) if global_bound is None else global_bound
    actual = interpreter.attention(given, tiles=tiles, global_bound=bound, scale=scale, **window)
    assert_as_accurate(
        actual, right_answers(given, scale=scale, **window), answers_of_pytorch(given, scale=scale, **window)
    )


@pytest.mark.parametrize("tokens", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1, 61, 131])
@pytest.mark.parametrize("globals_", GLOBALS.values(), ids=GLOBALS)
def test_every_length_gives_the_right_answer(
    globals_: Callable[[int], list[int]], tokens: int, interpreter: Interpreter
) -> None:
    check(interpreter, texts(kinds(tokens, globals_(tokens))))


@pytest.mark.parametrize(
    ("left", "right"), [(0, 0), (1, 1), (64, 64), (500, 500), (16, 3), (0, 16), (40, 0), (2**31, 2**40)]
)
@pytest.mark.parametrize("globals_", [pytest.param("none", marks=pytest.mark.nightly), "scattered"])
def test_every_window_gives_the_right_answer(globals_: str, left: int, right: int, interpreter: Interpreter) -> None:
    check(interpreter, texts(kinds(131, GLOBALS[globals_](131))), left=left, right=right)


@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("globals_", ["none", "first", "scattered"])
def test_padding_is_neither_seen_nor_answered(
    globals_: str, padding: Callable[[int], list[int]], interpreter: Interpreter
) -> None:
    check(interpreter, texts(kinds(97, GLOBALS[globals_](97), padding(97))), left=40)


def test_texts_of_a_batch_do_not_mix(interpreter: Interpreter) -> None:
    rows = [kinds(97, [0, 50]), kinds(97, [], range(41, 97)), kinds(97, range(20), range(90, 97))]
    check(interpreter, texts(torch.cat(rows), heads=2))


@pytest.mark.parametrize(
    ("dilation", "tokens"),
    [
        *itertools.product([(1, 2, 7), (3, 3, 1), (5,)], [1, 7, 61, 131]),
        # Each token is a program.
        *itertools.product([(2**31 - 1,)], [1, 7, 33]),
        pytest.param((2**31 - 1,), 131, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_every_dilation_gives_the_right_answer(
    dilation: tuple[int, ...], tokens: int, interpreter: Interpreter
) -> None:
    given = texts(kinds(tokens, GLOBALS["scattered"](tokens), PADDINGS["right"](tokens)), heads=len(dilation))
    check(interpreter, given, left=9, right=5, dilation=dilation)


# Not bfloat16: Triton 3.9's interpreter multiplies its bit patterns as integers.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_and_dtype_gives_the_right_answer_with_the_tiles_of_a_gpu(
    head_dim: int, dtype: torch.dtype, interpreter: Interpreter
) -> None:
    given = texts(kinds(300, [0, 150], range(280, 300)), head_dim=head_dim, dtype=dtype)
    tiles = tiles_for(86, head_dim, str(dtype).removeprefix("torch."))
    check(interpreter, given, left=100, right=90, tiles=tiles)


def test_a_head_of_128_may_be_one_part_or_two(interpreter: Interpreter) -> None:
    given = texts(kinds(61, [0]), head_dim=128)
    for head in (64, 128):
        check(interpreter, given, tiles=Tiles(32, 16, 4, 2, head))


def test_scores_far_beyond_exp_do_not_overflow(interpreter: Interpreter) -> None:
    check(interpreter, texts(kinds(61, [0, 30]), size=1000))


def test_keys_outside_the_window_are_not_loaded(interpreter: Interpreter) -> None:
    given = texts(kinds(200))
    right, pytorch = right_answers(given, **RIGHT_WINDOW), answers_of_pytorch(given, **RIGHT_WINDOW)
    for tensor in (given.key, given.value):
        tensor[:, :, 128:] = torch.nan
    actual = interpreter.attention(given, tiles=SMALL, global_bound=0, **RIGHT_WINDOW)
    # Blocks of 32 queries: the last one whose windows end before token 128 is the third.
    assert_as_accurate(actual[:, :, :96], right[:, :, :96], pytorch[:, :, :96])
    assert torch.isnan(actual[:, :, 128:]).all()


def test_a_bound_above_the_number_of_globals_changes_nothing(interpreter: Interpreter) -> None:
    for globals_ in ([], [5, 40]):
        check(interpreter, texts(kinds(61, globals_)), global_bound=70)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    row=st.lists(st.sampled_from([0, 1, 1, 1, 1, 1, 1, 2]), min_size=1, max_size=150),
    left=st.integers(0, 90),
    right=st.integers(0, 90),
    dilation=st.integers(1, 4),
)
def test_any_mixture_of_kinds_gives_the_right_answer(
    row: list[int], left: int, right: int, dilation: int, interpreter: Interpreter
) -> None:
    given = texts(torch.tensor([row], dtype=torch.int32))
    check(interpreter, given, left=left, right=right, dilation=(dilation,))


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 100])
def test_the_plan_names_the_globals_and_the_runs_of_local_tokens(tokens: int, interpreter: Interpreter) -> None:
    generator = torch.Generator().manual_seed(tokens)
    of_kind = torch.tensor([0, 1, 1, 1, 1, 1, 1, 2], dtype=torch.int32)
    token_kind = of_kind[torch.randint(len(of_kind), (2, tokens), generator=generator)]
    bound = 40
    plan = interpreter.plan(token_kind, global_bound=bound)
    for row, written in zip(token_kind.tolist(), plan.tolist(), strict=True):
        listed = [token for token, kind in enumerate(row) if kind == GLOBAL]
        local = [token for token, kind in enumerate(row) if kind == LOCAL]
        begins = [max((j + 1 for j in range(i + 1) if row[j] != LOCAL), default=0) for i in range(tokens)]
        ends = [min((j for j in range(i, tokens) if row[j] != LOCAL), default=tokens) for i in range(tokens)]
        summary = [len(listed), min(local, default=tokens), max(local, default=-1) + 1, 0]
        assert written[:SUMMARY_INTS] == summary
        assert written[SUMMARY_INTS : SUMMARY_INTS + tokens] == begins
        assert written[SUMMARY_INTS + tokens : SUMMARY_INTS + 2 * tokens] == ends
        assert written[SUMMARY_INTS + 2 * tokens :] == listed + [-1] * (bound - len(listed))


def test_globals_beyond_the_bound_are_not_listed(interpreter: Interpreter) -> None:
    plan = interpreter.plan(kinds(70, range(70)), global_bound=3)
    assert plan[0, 0] == 3
    assert plan[0, -3:].tolist() == [0, 1, 2]


WRONG_WINDOWS = {
    "one token more to the left": {"left": WINDOW + 1},
    "one token less to the left": {"left": WINDOW - 1},
    "one token more to the right": {"right": WINDOW + 1},
    "one token less to the right": {"right": WINDOW - 1},
    "another dilation": {"dilation": (2,)},
    "another scale": {"scale": 0.11},
}
RIGHT_WINDOW = {"left": WINDOW, "right": WINDOW, "dilation": (1,), "scale": 0.1}
HALF_PADDED = kinds(61, [0], range(50, 61))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("wrong", WRONG_WINDOWS.values(), ids=WRONG_WINDOWS)
def test_the_comparison_refuses_another_window(wrong: dict[str, object], dtype: torch.dtype) -> None:
    given = texts(HALF_PADDED, dtype=dtype)
    right, pytorch = right_answers(given, **RIGHT_WINDOW), answers_of_pytorch(given, **RIGHT_WINDOW)
    assert_as_accurate(right.to(dtype), right, pytorch)
    with pytest.raises(AssertionError, match="error"):
        assert_as_accurate(right_answers(given, **{**RIGHT_WINDOW, **wrong}).to(dtype), right, pytorch)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e-3])
def test_the_comparison_refuses_a_single_wrong_value(value: float) -> None:
    given = texts(HALF_PADDED)
    right, pytorch = right_answers(given, **RIGHT_WINDOW), answers_of_pytorch(given, **RIGHT_WINDOW)
    for token in (0, 60):  # token 60 is padding, whose row is 0
        wrong = right.float()
        wrong[0, 0, token, 7] += value
        with pytest.raises(AssertionError):
            assert_as_accurate(wrong, right, pytorch)


def test_the_comparison_refuses_a_global_token_that_counts_twice() -> None:
    given = texts(HALF_PADDED)
    right, pytorch = right_answers(given, **RIGHT_WINDOW), answers_of_pytorch(given, **RIGHT_WINDOW)
    doubled = Texts(
        query=torch.cat([given.query[:, :, :1], given.query], 2),
        key=torch.cat([given.key[:, :, :1], given.key], 2),
        value=torch.cat([given.value[:, :, :1], given.value], 2),
        token_kind=torch.cat([given.token_kind[:, :1], given.token_kind], 1),
    )
    with pytest.raises(AssertionError, match="error"):
        assert_as_accurate(right_answers(doubled, **RIGHT_WINDOW)[:, :, 1:].float(), right, pytorch)


FITTING = {
    "batch": 2, "heads": 12, "tokens": 1000, "head_dim": 64,
    "left": 256, "right": 256, "scale": 0.125, "global_bound": 16, "block_queries": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": 0}, "tokens is 0; it is 1 or more"),
        ({"batch": 0}, "batch is 0; it is 1 or more"),
        ({"left": -1}, "left is -1; it is 0 or more"),
        ({"right": -1}, "right is -1; it is 0 or more"),
        ({"global_bound": -1}, "global_bound is -1; it is 0 or more"),
        ({"scale": 0.0}, "scale is 0.0; the kernel needs a finite one greater than 0"),
        ({"scale": math.nan}, "scale is nan; the kernel needs"),
        ({"dilation": (1, 2)}, r"dilation is \[1, 2\]; it has 1 value or 12, one a head, each 1 or more"),
        ({"dilation": (0,)}, r"dilation is \[0\]"),
        ({"dilation": ()}, r"dilation is \[\]"),
        ({"head_dim": 48}, "no head_dim 48; it has 32, 64, 80, 96, 128"),
        ({"tokens": 2**22, "head_dim": 128}, "too large for one launch"),
        ({"batch": 2**16}, "too large for one launch"),
    ],
)
def test_what_cannot_be_launched_is_refused(wrong: dict[str, object], message: str) -> None:
    assert len(launches(**FITTING)) == 2
    with pytest.raises(ValueError, match=message):
        launches(**{**FITTING, **wrong})


def test_heads_of_one_dilation_are_one_launch() -> None:
    plan, *attends = launches(**{**FITTING, "dilation": (1,) * 8 + (2,) * 3 + (3,)})
    assert plan.kernel == "plan_keys"
    assert [(attend.scalars["first_head"], attend.grid) for attend in attends] == [
        (0, (8, 8, 2)), (8, (2 * 4, 3, 2)), (11, (3 * 3, 1, 2)),
    ]  # fmt: skip


def test_the_workspace_grows_linearly_with_the_text() -> None:
    assert workspace_bytes(1, 16384, 64) == 4 * (SUMMARY_INTS + 2 * 16384 + 64)
    assert workspace_bytes(3, 1, 0) == 4 * 3 * (SUMMARY_INTS + 2)


def test_an_unsupported_head_dim_dtype_or_gpu_is_refused() -> None:
    for wrong, message in (
        ({"head_dim": 72}, "no head_dim 72; it has 32, 64, 80, 96, 128"),
        ({"dtype": "int8"}, "no int8; it has float16, bfloat16, float32"),
        ({"architectures": [75]}, "compute capability 8.0 or newer, not sm_75"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel_sources(**{"head_dim": 64, "dtype": "float16", "architectures": [90], **wrong})


def test_tensors_that_do_not_fit_are_refused(interpreter: Interpreter) -> None:
    given = texts(kinds(20), head_dim=64)
    transposed = given.key.transpose(2, 3).contiguous().transpose(2, 3)
    for wrong, message in (
        ({"key": given.key.half()}, r"key is torch.float16 \[1, 1, 20, 64\]"),
        ({"key": transposed}, "contiguous and alike"),
        ({"token_kind": given.token_kind.long()}, r"token_kind is torch.int64 .*torch.int32 \[1, 20\]"),
        ({"token_kind": kinds(21)}, r"token_kind is torch.int32 \[1, 21\]"),
    ):
        with pytest.raises(ValueError, match=message):
            check_input(interpreter, Texts(**{**vars(given), **wrong}))


def check_input(interpreter: Interpreter, given: Texts) -> None:
    interpreter.attention(given, tiles=SMALL, left=1, right=1, scale=1.0, global_bound=0)
