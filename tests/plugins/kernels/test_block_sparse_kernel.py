"""The GPU kernels of block-sparse attention, interpreted on the CPU, against the definition of the operator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hdplugins.kernels.attention_tiles import HEAD_DIMS, Tiles
from hdplugins.operators.block_sparse_attention.geometry import (
    HEADER_INTS,
    constants_of,
    kernel_sources,
    launches,
    tiles_for_blocks,
    workspace_bytes,
)
from hdplugins.operators.block_sparse_attention.reference import block_sparse_attention
from support.comparators import assert_as_accurate
from support.interpreted_kernel import BlockTexts, Interpreter

pytest.importorskip("triton", reason="the kernel is written in Triton, which has no wheel for this platform")

SMALL = Tiles(block_queries=16, block_keys=16, num_warps=4, num_stages=2, head=32)
BLOCK = 16
PLAIN: dict[str, Any] = {
    "block_size": BLOCK, "first_global": 0, "last_global": 0, "window": 1, "first_repeats": 0, "dense_tokens": 0,
    "ends_by_row": 0, "scale": 0.2,
}  # fmt: skip
HF_EVAL = PLAIN | {"first_global": 1, "last_global": 1, "first_repeats": 3}
MODES: dict[str, tuple[dict[str, Any], Callable[[], torch.Tensor | None]]] = {
    "hf_eval": (HF_EVAL, lambda: None),
    "table": (HF_EVAL | {"first_repeats": 0}, lambda: table(2, 5, 2)),
    "etc": (PLAIN | {"first_global": 2}, lambda: None),
    "blocks": (PLAIN | {"window": -1}, lambda: table(1, 9, 3)),
}
DENSE_TOKENS = 50
"""Of a text in these tests that is short: neither a whole number of blocks nor a length of theirs."""


def table(heads: int, rows: int, listed: int) -> torch.Tensor:
    """Blocks of any text here, and some that are no block of it: -1, and numbers beyond the last."""
    return torch.randint(-1, 9, (heads, rows, listed), generator=torch.Generator().manual_seed(rows), dtype=torch.int32)


def masks(tokens: int) -> torch.Tensor:
    """[3, tokens]: no padding; padding behind and a hole; real tokens here and there, none in the first block."""
    mask = torch.ones(3, tokens, dtype=torch.int32)
    mask[1, tokens - tokens // 3 :] = 0
    mask[1, tokens // 4] = 0
    mask[2] = (torch.arange(tokens) % 3 == 1) & (torch.arange(tokens) >= min(BLOCK, tokens // 2))
    return mask


def texts(
    token_mask: torch.Tensor,
    listed_blocks: torch.Tensor | None = None,
    *,
    heads: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    size: float = 1,
) -> BlockTexts:
    shape = (token_mask.shape[0], heads, token_mask.shape[1], head_dim)
    generator = torch.Generator().manual_seed(math.prod(shape))
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    # What padding holds does not count: a query of padding is 0 even if it is not a number.
    query.masked_fill_((token_mask == 0)[:, None, :, None], torch.nan)
    return BlockTexts(
        query=(query * size).to(dtype), key=key.to(dtype), value=value.to(dtype), token_mask=token_mask,
        listed_blocks=listed_blocks,
    )  # fmt: skip


def right_answers(given: BlockTexts, dtype: torch.dtype = torch.float64, **attributes: Any) -> torch.Tensor:
    tensors = (tensor.nan_to_num().to(dtype) for tensor in (given.query, given.key, given.value))
    return block_sparse_attention(*tensors, given.token_mask, given.listed_blocks, **attributes)


def check(interpreter: Interpreter, given: BlockTexts, *, tiles: Tiles = SMALL, **attributes: Any) -> None:
    actual, _ = interpreter.block_attention(given, tiles=tiles, **attributes)
    in_its_dtype = right_answers(given, given.query.dtype, **attributes)
    assert_as_accurate(actual, right_answers(given, **attributes), in_its_dtype)


@pytest.mark.parametrize(
    ("tokens", "ends_by_row"),
    [
        *itertools.product([1, BLOCK, 2 * BLOCK + 1], [0, 1]),
        (6 * BLOCK - 1, 1),
        pytest.param(6 * BLOCK - 1, 0, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_and_length_gives_the_right_answer(
    mode: str, ends_by_row: int, tokens: int, interpreter: Interpreter
) -> None:
    attributes, listed_blocks = MODES[mode]
    changes = {"ends_by_row": ends_by_row, "dense_tokens": DENSE_TOKENS if ends_by_row else 0}
    listed = listed_blocks()
    check(interpreter, texts(masks(tokens), listed, heads=1 if listed is None else 2), **attributes | changes)


@pytest.mark.parametrize(
    ("tokens", "ends_by_row"), [(DENSE_TOKENS, 0), (DENSE_TOKENS + 1, 0), (DENSE_TOKENS, 1), (DENSE_TOKENS + 1, 1)]
)
def test_a_text_is_dense_up_to_a_length_and_not_beyond(tokens: int, ends_by_row: int, interpreter: Interpreter) -> None:
    mask = torch.zeros(2, 70 if ends_by_row else tokens, dtype=torch.int32)
    mask[:, :tokens] = 1
    check(interpreter, texts(mask), **HF_EVAL | {"dense_tokens": DENSE_TOKENS, "ends_by_row": ends_by_row})


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_text_of_nothing_but_padding_is_0(tokens: int, interpreter: Interpreter) -> None:
    mask = torch.zeros(2, tokens, dtype=torch.int32)
    mask[1, tokens // 2] = 1
    for ends_by_row in (0, 1):
        check(interpreter, texts(mask), **HF_EVAL | {"ends_by_row": ends_by_row})


@pytest.mark.parametrize(
    ("first_global", "ends_by_row"),
    [*(pytest.param(*case, marks=pytest.mark.nightly) for case in [(0, 0), (1, 1)]), (2, 1)],
)
def test_the_queries_of_global_blocks_see_all_in_parts(
    first_global: int, ends_by_row: int, interpreter: Interpreter
) -> None:
    """A text in two parts, one whose last block is among the first ones, one that is short, and one of padding."""
    mask = torch.zeros(4, 520, dtype=torch.int32)
    mask[0], mask[1, :200], mask[2, :100], mask[0, 150:400:7] = 1, 1, 1, 0
    attributes = HF_EVAL | {
        "block_size": 128, "first_global": first_global, "ends_by_row": ends_by_row, "dense_tokens": 100,
    }  # fmt: skip
    check(interpreter, texts(mask, heads=1), tiles=Tiles(128, 128, 4, 2, 32), **attributes)
    constants = constants_of(SMALL, head_dim=32, block_size=128)
    last = launches((4, 1, 520, 32), None, constants=constants, **attributes)[-1]
    assert (last.kernel, last.scalars["splits"]) == ("combine", 2)


@pytest.mark.parametrize(("window", "first_global"), [(-1, 0), (0, 0), (2, 0), (2**31 - 1, 0), (0, 2**31 - 1)])
def test_every_window_gives_the_right_answer(window: int, first_global: int, interpreter: Interpreter) -> None:
    changes = {"window": window, "first_global": first_global, "last_global": window % 2}
    check(interpreter, texts(masks(79), heads=1), **PLAIN | changes)


@pytest.mark.parametrize("block_size", [1, 5, 32, 64, 84, 128])
def test_every_block_size_gives_the_right_answer_with_the_tiles_of_a_gpu(
    block_size: int, interpreter: Interpreter
) -> None:
    given = texts(masks(min(3 * block_size + block_size // 2 + 4, 300))[1:], heads=1, dtype=torch.float16)
    tiles = tiles_for_blocks(86, 32, "float16", block_size)
    check(interpreter, given, tiles=tiles, **HF_EVAL | {"block_size": block_size, "scale": 32**-0.5})


# Not bfloat16: Triton 3.9's interpreter multiplies its bit patterns as integers.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_and_dtype_gives_the_right_answer_with_the_tiles_of_a_gpu(
    head_dim: int, dtype: torch.dtype, interpreter: Interpreter
) -> None:
    given = texts(masks(270)[1:2], heads=1, head_dim=head_dim, dtype=dtype)
    tiles = tiles_for_blocks(86, head_dim, str(dtype).removeprefix("torch."), 128)
    check(interpreter, given, tiles=tiles, **HF_EVAL | {"block_size": 128, "scale": head_dim**-0.5})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [64, 84])
@pytest.mark.parametrize("mode", MODES)
def test_a_gpu_gives_the_right_answers(mode: str, block_size: int, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    from hdplugins.operators.block_sparse_attention.triton_kernel import launch

    attributes, listed_blocks = MODES[mode]
    attributes = attributes | {"block_size": block_size, "ends_by_row": 1, "dense_tokens": 100, "scale": 0.125}
    given = texts(masks(1100), listed_blocks(), head_dim=64, dtype=dtype)
    table = None if given.listed_blocks is None else given.listed_blocks.shape
    on_gpu = {name: None if tensor is None else tensor.cuda() for name, tensor in vars(given).items()}
    sizes = workspace_bytes(tuple(given.query.shape), table, **attributes)
    scratch = {name: torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for name, size in sizes.items()}
    major, minor = torch.cuda.get_device_capability()
    tiles = tiles_for_blocks(10 * major + minor, 64, str(dtype).removeprefix("torch."), block_size)
    out = torch.full_like(given.query, torch.nan, device="cuda")
    launch(**on_gpu, out=out, **scratch, tiles=tiles, **attributes)
    assert_as_accurate(out.cpu(), right_answers(given, **attributes), right_answers(given, dtype, **attributes))


def test_scores_far_beyond_exp_do_not_overflow(interpreter: Interpreter) -> None:
    check(interpreter, texts(masks(95), size=1000), **HF_EVAL | {"first_repeats": 2**31 - 1})


def test_blocks_that_no_query_sees_are_not_loaded(interpreter: Interpreter) -> None:
    given = texts(torch.ones(1, 8 * BLOCK, dtype=torch.int32))
    right, in_its_dtype = right_answers(given, **PLAIN), right_answers(given, torch.float32, **PLAIN)
    for tensor in (given.key, given.value):
        tensor[:, :, 5 * BLOCK :] = torch.nan
    actual, _ = interpreter.block_attention(given, tiles=SMALL, **PLAIN)
    seen_by = 4 * BLOCK  # block 4 is the first that sees block 5
    assert_as_accurate(actual[:, :, :seen_by], right[:, :, :seen_by], in_its_dtype[:, :, :seen_by])
    assert torch.isnan(actual[:, :, seen_by:]).all()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    row=st.lists(st.sampled_from([0, 1, 1, 1]), min_size=1, max_size=90),
    first_global=st.integers(0, 3),
    last_global=st.integers(0, 1),
    window=st.integers(-1, 2),
    first_repeats=st.integers(0, 2),
    dense_tokens=st.sampled_from([0, 40]),
    ends_by_row=st.integers(0, 1),
    listed=st.integers(0, 9),
)
def test_any_mixture_gives_the_right_answer(
    row: list[int], listed: int, interpreter: Interpreter, **attributes: int
) -> None:
    listed_blocks = table(2, 3, listed) if listed else None
    check(interpreter, texts(torch.tensor([row], dtype=torch.int32), listed_blocks), **PLAIN | attributes)


def test_the_plan_lists_each_block_once_whole_or_partial_with_how_often_it_counts(interpreter: Interpreter) -> None:
    mask = torch.ones(1, 7 * BLOCK, dtype=torch.int32)
    mask[0, 3 * BLOCK + 2] = 0  # block 3 is partial
    mask[0, 5 * BLOCK : 6 * BLOCK] = 0  # block 5 is nothing
    listed_blocks = torch.tensor([[[4, 4], [3, 6], [0, 9], [-1, 5]]], dtype=torch.int32)
    given = texts(mask, listed_blocks, heads=1)
    attributes = PLAIN | {"first_global": 1, "last_global": 1, "first_repeats": 2}
    _, plan = interpreter.block_attention(given, tiles=SMALL, **attributes)
    (written,) = plan.tolist()
    assert written[:2] == [6, 0]
    assert written[HEADER_INTS : HEADER_INTS + 14] == [16, 16, 16, 15, 16, 0, 16, 16, 32, 48, 64, 80, 0, 112]
    lists = HEADER_INTS + 14
    assert listed_at(plan, lists, room=7) == ([0, 1, 2, 4, 6], {3: 1})
    # Behind the list of all: a list a block of queries, with room for all that a query may see.
    room = min(7, 2 + 3 + 1 + 2)
    rows = [listed_at(plan, lists + 2 + 3 * 7 + i * (2 + 3 * room), room=room) for i in range(1, 5)]
    assert rows == [
        ([1, 2, 6], {0: 3, 4: 2}),  # 4 is listed twice
        ([1, 2], {0: 3, 3: 2, 6: 2}),  # 3 is its neighbour and listed
        ([2, 4, 6], {0: 4, 3: 1}),  # 9 is no block
        ([4, 6], {0: 3, 3: 1}),  # 5 has no token
    ]


def listed_at(plan: torch.Tensor, place: int, *, room: int) -> tuple[list[int], dict[int, float]]:
    """Whole blocks, and partial ones with how often they count."""
    wholes, partials = plan[0, place : place + 2].tolist()
    first = place + 2 + room
    times = plan[0, first + room : first + room + partials].view(torch.float32).exp2()
    named = plan[0, first : first + partials].tolist()
    return plan[0, place + 2 : place + 2 + wholes].tolist(), dict(zip(named, times.tolist(), strict=True))


WRONG = {
    "a wider window": {"window": 2},
    "block 0 once more": {"first_repeats": 4},
    "block 0 once less": {"first_repeats": 2},
    "no global block in front": {"first_global": 0},
    "no global block behind": {"last_global": 0},
    "the end of the row": {"ends_by_row": 1},
    "dense": {"dense_tokens": 95},
    "another scale": {"scale": 0.21},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_the_comparison_refuses_another_pattern(wrong: dict[str, Any], dtype: torch.dtype) -> None:
    given = texts(masks(95), dtype=dtype)
    right, in_its_dtype = right_answers(given, **HF_EVAL), right_answers(given, dtype, **HF_EVAL)
    assert_as_accurate(right.to(dtype), right, in_its_dtype)
    with pytest.raises(AssertionError, match="error"):
        assert_as_accurate(right_answers(given, **HF_EVAL | wrong).to(dtype), right, in_its_dtype)


def test_the_comparison_refuses_another_table() -> None:
    attributes, listed_blocks = MODES["table"]
    given = texts(masks(95), listed_blocks())
    right, in_its_dtype = right_answers(given, **attributes), right_answers(given, torch.float32, **attributes)
    other = BlockTexts(**{**vars(given), "listed_blocks": table(2, 5, 2).flip(0)})
    with pytest.raises(AssertionError, match="error"):
        assert_as_accurate(right_answers(other, **attributes).float(), right, in_its_dtype)


SHAPE = (2, 12, 4096, 64)
FITTING = HF_EVAL | {"block_size": 64, "dense_tokens": 704}
CONSTANTS = constants_of(Tiles(64, 64, 4, 3, 64), head_dim=64, block_size=64)


def launched(shape: tuple[int, ...] = SHAPE, table: tuple[int, ...] | None = None, **changes: Any) -> Any:
    return launches(shape, table, constants=CONSTANTS, **FITTING | changes)


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ((2, 12, 0, 64), {}, "tokens is 0; it is 1 or more"),
        ((0, 12, 99, 64), {}, "batch is 0; it is 1 or more"),
        ((2, 12, 99, 48), {}, "no head_dim 48; it has 32, 64, 80, 96, 128"),
        ((1, 12, 2**22, 128), {}, "too large for one launch"),
        (SHAPE, {"scale": 0.0}, "scale is 0.0; the kernel needs a finite one greater than 0"),
        (SHAPE, {"block_size": 0}, "block_size is 0; the kernel has blocks of 1 to 1024 tokens"),
        (SHAPE, {"block_size": 2048}, "block_size is 2048; the kernel has blocks of 1 to 1024 tokens"),
        (SHAPE, {"window": -2}, "window is -2; it is -1 to"),
        (SHAPE, {"last_global": 2}, "last_global is 2; it is 0 to 1"),
        (SHAPE, {"first_global": -1}, "first_global is -1; it is 0 to"),
        (SHAPE, {"first_repeats": -1}, "first_repeats is -1; it is 0 to"),
        (SHAPE, {"dense_tokens": -1}, "dense_tokens is -1; it is 0 to"),
        (SHAPE, {"table": (3, 62, 3)}, r"listed_blocks is \[3, 62, 3\]; for 12 heads it is \[1 or 12, rows, listed\]"),
        (SHAPE, {"table": (1, 62)}, r"listed_blocks is \[1, 62\]"),
        (SHAPE, {"table": (12, 62, 0)}, r"listed_blocks is \[12, 62, 0\]"),
        ((1, 12, 2**20, 64), {"block_size": 1, "table": (12, 9, 2**20)}, "are too many"),
    ],
)  # fmt: skip
def test_what_cannot_be_launched_is_refused(shape: tuple[int, ...], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launched(shape, **changes)


def test_parts_of_global_queries_are_programs_of_their_own_in_front() -> None:
    count, lists, attend, combine = launched()
    assert (count.kernel, lists.kernel, lists.grid) == ("count_tokens", "list_blocks", (64 + 1, 1, 2))
    # 8 parts of 512 keys of the first block and the last one, then 64 blocks.
    assert (attend.kernel, attend.grid, attend.scalars["splits"]) == ("attend", (2 * 8 + 64, 12, 2), 8)
    assert (combine.kernel, combine.grid) == ("combine", (2 * 64 // 4, 12, 2))
    assert launched(table=(12, 62, 3))[1].grid == (64 + 1, 12, 2)


@pytest.mark.parametrize(
    "changes", [{"dense_tokens": 4096}, {"first_global": 0, "last_global": 0}, {"shape": (2, 12, 512, 64)}], ids=str
)
def test_where_no_block_is_split_nothing_is_combined(changes: dict[str, Any]) -> None:
    assert [step.kernel for step in launched(**changes)] == ["count_tokens", "list_blocks", "attend"]
    changes = dict(changes)
    assert workspace_bytes(changes.pop("shape", SHAPE), None, **FITTING | changes)["partials"] == 0


def test_the_workspace_never_shrinks_with_the_shape_and_is_linear_in_tokens() -> None:
    def total(batch: int, tokens: int, table: tuple[int, ...] | None = None, **changes: Any) -> int:
        return sum(workspace_bytes((batch, 12, tokens, 64), table, **FITTING | changes).values())

    for changes in ({}, {"ends_by_row": 1}, {"first_global": 40}, {"window": 9}):
        sizes = [total(1, tokens, **changes) for tokens in range(1, 2000)]
        assert sizes == sorted(sizes)
    assert total(1, 1000) < total(2, 1000)
    assert total(1, 1000, (1, 9, 3)) < total(1, 1000, (12, 9, 3)) < total(1, 1000, (12, 9, 4))
    assert total(1, 32768, (12, 510, 3)) <= 2 * total(1, 16384, (12, 254, 3))


def test_an_unsupported_head_dim_dtype_block_size_or_gpu_is_refused() -> None:
    fitting = {"head_dim": 64, "block_size": 64, "has_table": False, "dtype": "float16", "architectures": [90]}
    for wrong, message in (
        ({"head_dim": 72}, "no head_dim 72; it has 32, 64, 80, 96, 128"),
        ({"dtype": "int8"}, "no int8; it has float16, bfloat16, float32"),
        ({"block_size": 1025}, "block_size is 1025; the kernel has blocks of 1 to 1024 tokens"),
        ({"architectures": [75]}, "compute capability 8.0 or newer, not sm_75"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel_sources(**{**fitting, **wrong})


def test_tensors_that_do_not_fit_are_refused(interpreter: Interpreter) -> None:
    given = texts(masks(20), table(2, 1, 1))
    for wrong, message in (
        ({"key": given.key.half()}, r"key is torch.float16 \[3, 2, 20, 32\]"),
        ({"value": given.value.transpose(2, 3).contiguous().transpose(2, 3)}, "contiguous and alike"),
        ({"token_mask": given.token_mask.long()}, r"token_mask is torch.int64 .*torch.int32 \[3, 20\]"),
        ({"token_mask": masks(21)}, r"token_mask is torch.int32 \[3, 21\]"),
        ({"listed_blocks": table(2, 1, 1).long()}, "listed_blocks is torch.int64, not contiguous torch.int32"),
        ({"listed_blocks": table(3, 1, 1)}, r"listed_blocks is \[3, 1, 1\]; for 2 heads"),
    ):
        with pytest.raises(ValueError, match=message):
            interpreter.block_attention(BlockTexts(**{**vars(given), **wrong}), tiles=SMALL, **PLAIN)
