"""The GPU kernels of sparse operators and of dense attention, interpreted on the CPU, against the definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hdplugins import OPERATORS
from hdplugins.attention.lsh.reference import hash_tokens
from hdplugins.attention.plugin_spec import plugin_spec_of
from hdplugins.kernels.block_config import BlockConfig
from support.attention_layers import Layer
from support.comparators import assert_as_accurate, named_case
from support.described_operators import KERNELS, WITH_KERNELS
from support.interpreted_kernel import Inputs, Interpreter
from support.kernel_cases import KernelDescription, answer_of_gpu, inputs_of, right_answers, row_of_kinds
from support.operators.blocks import BLOCK_MODES, Blocks, block_mask
from support.operators.chunks import Chunks, chunk_mask
from support.operators.dense import Dense
from support.operators.lsh import Lsh
from support.operators.window import Window

pytest.importorskip("triton", reason="the kernel is written in Triton, which has no wheel for this platform")

each_operator = pytest.mark.parametrize(("operator", "described"), KERNELS.items(), ids=KERNELS)


def answer_of(
    interpreter: Interpreter, layer: Layer, inputs: Inputs, block_config: BlockConfig | None = None
) -> torch.Tensor:
    name = layer.operator.name
    return interpreter.attention(
        name, inputs, block_config=block_config or KERNELS[name].block_config, attributes=layer.node_attributes
    )[0]


def answers_of_pytorch(layer: Layer, inputs: Inputs) -> torch.Tensor:
    return layer.by_pytorch([inputs[name].nan_to_num() for name in layer.operator.state_names], inputs)


def check(
    interpreter: Interpreter,
    layer: Layer,
    kinds: torch.Tensor,
    *,
    block_config: BlockConfig | None = None,
    size: float = 1,
) -> None:
    inputs = inputs_of(layer, kinds, size=size)
    actual = answer_of(interpreter, layer, inputs, block_config)
    right = right_answers(layer, inputs)
    # Where scores are large, PyTorch's error is luck: it depends on the order in which this processor adds.
    orders = (answers_of_pytorch(layer, inputs), answers_of_pytorch(layer, backwards(layer, inputs)))
    assert_as_accurate(actual, right, max(orders, key=lambda usual: float((usual.double() - right).abs().max())))


def backwards(layer: Layer, inputs: Inputs) -> Inputs:
    """The inputs with the values of each head in the opposite order, which changes nothing but the order of sums."""
    *scored, _ = layer.operator.state_names
    return {name: value.flip(-1) if name in scored else value for name, value in inputs.items()}


def test_every_operator_with_a_kernel_is_described() -> None:
    """Those with tables of distances in test_distance_kernel.py."""
    by_distance = {"ClippedDistanceAttention", "RelativeAttention"}
    assert {*KERNELS, *by_distance} == WITH_KERNELS


@pytest.mark.parametrize(
    ("layer", "kinds", "block_config", "size"),
    [
        pytest.param(*case.values, id=f"{name} {case.id}", marks=case.marks)
        for name, described in KERNELS.items()
        for case in described.cases
    ],
)
def test_a_kernel_gives_the_right_answer(
    layer: Layer, kinds: torch.Tensor, block_config: BlockConfig | None, size: float, interpreter: Interpreter
) -> None:
    check(interpreter, layer, kinds, block_config=block_config, size=size)


@pytest.mark.parametrize(
    "not_loaded", [described.not_loaded for described in KERNELS.values() if described.not_loaded], ids=str
)
def test_keys_that_no_query_sees_are_not_loaded(
    not_loaded: tuple[Layer, int, int, int, int], interpreter: Interpreter
) -> None:
    layer, tokens, nan_from, unseen_until, seen_from = not_loaded
    inputs = inputs_of(layer, row_of_kinds(tokens))
    right, pytorch = right_answers(layer, inputs), answers_of_pytorch(layer, inputs)
    for name in ("key", "value"):
        inputs[name][:, nan_from:] = torch.nan
    actual = answer_of(interpreter, layer, inputs)
    assert_as_accurate(actual[:, :unseen_until], right[:, :unseen_until], pytorch[:, :unseen_until])
    assert torch.isnan(actual[:, seen_from:]).all()


@settings(max_examples=4, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    row=st.lists(st.sampled_from([-1, 0, 1, 1, 1, 1, 1, 1, 2]), min_size=1, max_size=90),
    left=st.integers(0, 90),
    right=st.integers(0, 90),
    dilation=st.integers(1, 4),
)
def test_any_window_over_any_mixture_of_kinds_gives_the_right_answer(
    row: list[int], left: int, right: int, dilation: int, interpreter: Interpreter
) -> None:
    layer = Window(left=left, right=right, dilation=(dilation,), heads=1, bound=row.count(2))
    check(interpreter, layer, torch.tensor([row], dtype=torch.int32))


@settings(max_examples=4, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=st.lists(st.sampled_from([0, 1, 1, 1]), min_size=1, max_size=90), causal=st.integers(0, 1))
def test_dense_attention_under_any_mask_gives_the_right_answer(
    row: list[int], causal: int, interpreter: Interpreter
) -> None:
    check(interpreter, Dense(heads=1, causal=causal), torch.tensor([row], dtype=torch.int32))


@pytest.mark.parametrize("causal", [0, 1])
def test_dense_attention_loads_no_padding_at_the_ends_of_a_text(causal: int, interpreter: Interpreter) -> None:
    layer = Dense(heads=1, causal=causal)
    inputs = inputs_of(layer, row_of_kinds(97, padding=[*range(33), *range(80, 97)]))
    right, pytorch = right_answers(layer, inputs), answers_of_pytorch(layer, inputs)
    for name in ("key", "value"):
        inputs[name][~inputs["key_mask"]] = torch.nan
    assert_as_accurate(answer_of(interpreter, layer, inputs), right, pytorch)


@settings(max_examples=4, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    row=st.lists(st.sampled_from([0, 1, 1, 1]), min_size=1, max_size=90),
    layer=st.builds(
        Blocks,
        block=st.just(16),
        first=st.integers(0, 3),
        last=st.integers(0, 1),
        window=st.integers(-1, 2),
        repeats=st.integers(0, 2),
        dense=st.sampled_from([0, 40]),
        by_row=st.integers(0, 1),
        listed=st.none() | st.tuples(st.just(2), st.just(3), st.integers(1, 9)),
    ),
)
def test_any_blocks_under_any_mask_give_the_right_answer(
    row: list[int], layer: Blocks, interpreter: Interpreter
) -> None:
    check(interpreter, layer, torch.tensor([row], dtype=torch.int32))


@settings(max_examples=3, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    # PyTorch's answers to shorter texts have too few values to show what rounding does.
    row=st.lists(st.sampled_from([0, 1, 1, 1]), min_size=16, max_size=50),
    layer=st.builds(
        Lsh,
        heads=st.just(1),
        chunk=st.integers(1, 20),
        before=st.integers(0, 2),
        after=st.integers(0, 2),
        multiple=st.integers(1, 3),
        causal=st.integers(0, 1),
        buckets=st.sampled_from([(2,), (6,), (2, 4)]),
        rounds=st.integers(1, 2),
        by_row=st.integers(0, 1),
    ),
)
def test_any_chunks_of_any_hashes_give_the_right_answer(row: list[int], layer: Lsh, interpreter: Interpreter) -> None:
    check(interpreter, layer, torch.tensor([row], dtype=torch.int32))


def test_a_token_of_which_a_query_sees_no_chunk_does_not_reach_it(interpreter: Interpreter) -> None:
    layer = Lsh(heads=1, chunk=16, buckets=(6,), rounds=1)
    inputs = inputs_of(layer, row_of_kinds(112))
    right, pytorch = right_answers(layer, inputs), answers_of_pytorch(layer, inputs)
    value = inputs["value"].double()
    value[:, 50] = torch.nan
    # The definition multiplies all that it looks at, so that NaN shows it.
    reached = layer.by_definition([inputs["query_key"].double(), value], inputs).isnan().any(-1)
    assert 16 <= reached.sum() <= 32
    inputs["value"][:, 50] = torch.nan
    actual = answer_of(interpreter, layer, inputs)
    assert torch.equal(actual.isnan().any(-1), reached)
    assert_as_accurate(actual[~reached], right[~reached], pytorch[~reached])


GPU_LAYERS: dict[str, tuple[Layer, torch.Tensor]] = {
    "dense": (Dense(heads=4, kv_heads=2, head_dim=64), chunk_mask(1100)),
    "dense, causal": (Dense(causal=1, head_dim=128), chunk_mask(1100)),
    **{
        f"{mode} {block}": (replace(layer, block=block, by_row=1, dense=100, head_dim=64), block_mask(1100))
        for mode, layer in BLOCK_MODES.items()
        for block in (64, 84)
    },
    "chunks": (Chunks(chunk=64, head_dim=64, multiple=2), chunk_mask(1100)),
    "chunks of 40, causal": (Chunks(chunk=40, head_dim=64, causal=1, after=2), chunk_mask(1100)),
    "lsh": (Lsh(chunk=64, head_dim=64, buckets=(34,), rounds=4), chunk_mask(1100)),
    "lsh by row": (Lsh(chunk=40, head_dim=64, buckets=(6, 40), rounds=2, by_row=1), chunk_mask(1100)),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("layer", "mask"), GPU_LAYERS.values(), ids=GPU_LAYERS)
def test_a_gpu_gives_the_right_answers(layer: Layer, mask: torch.Tensor) -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        typed = replace(layer, dtype=dtype)
        inputs = inputs_of(typed, mask)
        actual = answer_of_gpu(typed.operator, inputs, typed.node_attributes)
        with named_case(dtype):
            assert_as_accurate(actual, right_answers(typed, inputs), answers_of_pytorch(typed, inputs))


def test_globals_beyond_the_bound_are_not_listed(interpreter: Interpreter) -> None:
    """And what is beside the list in the workspace is left alone, as `guarded` demands."""
    layer = Window(left=16, right=16, heads=1, bound=3)
    name, block_config = layer.operator.name, KERNELS["SlidingWindowAttention"].block_config
    inputs = inputs_of(layer, row_of_kinds(70, range(70)))
    _, workspaces = interpreter.attention(name, inputs, block_config=block_config, attributes=layer.node_attributes)
    block_index = workspaces["block_index"].view(torch.int32)
    assert block_index[0] == 3
    assert block_index[-3:].tolist() == [0, 1, 2]


# Hashes, and how they are sorted.


def test_hashes_are_those_of_the_definition_the_first_of_equal_directions(interpreter: Interpreter) -> None:
    """Small whole numbers, whose products are exact, and often equal."""
    layer = Lsh(chunk=16, buckets=(70, 4), rounds=2, heads=2)
    # Several spans, each of which is counted apart.
    inputs, generator = inputs_of(layer, chunk_mask(150)[1:3]), torch.Generator().manual_seed(3)
    whole = [torch.randint(-2, 3, inputs[name].shape, generator=generator) for name in ("query_key", "rotations")]
    whole[0][:, ::7] = 0  # hashed to the first bucket
    inputs |= dict(zip(("query_key", "rotations"), map(torch.Tensor.float, whole), strict=True))
    wanted = hash_tokens(inputs["query_key"], inputs["rotations"], layer.buckets)
    wanted = wanted.masked_fill(inputs["token_mask"][:, None, None] == 0, 280).int()
    hashes, order = hashes_and_order(interpreter, layer, inputs)
    assert torch.equal(hashes, wanted)
    assert torch.equal(order, wanted.argsort(dim=-1, stable=True).int())


def test_tokens_that_are_not_numbers_have_a_bucket_and_a_place(interpreter: Interpreter) -> None:
    layer = Lsh(chunk=16, buckets=(70,), rounds=1, heads=1)
    inputs = inputs_of(layer, row_of_kinds(40))
    right, pytorch = right_answers(layer, inputs), answers_of_pytorch(layer, inputs)
    texts = {name: torch.cat([tensor] * 4) for name, tensor in inputs.items() if name != "rotations"}
    for text, wrong in enumerate((torch.nan, torch.inf, -torch.inf), 1):
        texts["query_key"][text, :, 5:25] = wrong
    texts["rotations"] = inputs["rotations"]
    hashes, order = hashes_and_order(interpreter, layer, texts)
    assert 0 <= hashes.min() <= hashes.max() < 70
    assert (order.sort(-1).values == torch.arange(40)).all()
    assert_as_accurate(answer_of(interpreter, layer, texts)[:1], right, pytorch)


def hashes_and_order(interpreter: Interpreter, layer: Lsh, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, heads, rounds, tokens] int32 each."""
    name = layer.operator.name
    _, buffers = interpreter.attention(
        name, inputs, block_config=KERNELS[name].block_config, attributes=layer.node_attributes
    )
    batch, tokens, heads, _ = inputs["query_key"].shape
    hashes, order = (buffers[each].view(torch.int32) for each in ("hashes", "order"))
    return hashes.view(batch, heads, layer.rounds, tokens), order.view(batch, heads, layer.rounds, tokens)


# Launches.


def shapes_of(operator: str, query: Sequence[int], last: Sequence[int] | None = None) -> list[tuple[int, ...]]:
    """The shapes of an operator's inputs; the last one is as the fitting node has it."""
    own, constants = tuple(query), KERNELS[operator].fitting.constants.values()
    others = [tuple(last)] if last else [constant.shape for constant in constants]
    return [*[own] * OPERATORS[operator].states, own[:2], *others]


@each_operator
def test_what_cannot_be_launched_or_compiled_is_refused(operator: str, described: KernelDescription) -> None:
    spec, fitting = plugin_spec_of(OPERATORS[operator]), described.fitting.node_attributes
    spec.check(shapes_of(operator, (2, 1000, 12, 64)), fitting)
    for changes, message in (
        ({"query": (2, 0, 12, 64)}, "tokens is 0; it must be 1 or more"),
        ({"query": (2, 99, 12, 48)}, "not support head_dim 48; they support 32, 64, 80, 96, 128"),
        ({"query": (2, 2**22, 12, 128)}, "too large for one launch"),
        ({"query": (2**16, 1000, 12, 64)}, "too large for one launch"),
        ({"scale": math.nan}, "scale is nan; the kernels need"),
        *described.refused,
    ):
        shapes = shapes_of(operator, changes.get("query", (2, 1000, 12, 64)), changes.get("last"))
        attributes = {name: changes.get(name, value) for name, value in fitting.items()}
        with named_case(changes), pytest.raises(ValueError, match=message):
            spec.check(shapes, attributes)
    shapes = shapes_of(operator, (2, 1000, 12, 64))
    for dtype, architecture, message in (
        ("int8", 90, "not support int8; they support float16, bfloat16, float32"),
        ("float16", 75, "compute capability 8.0 or newer, not sm_75"),
    ):
        with named_case(message), pytest.raises(ValueError, match=message):
            spec.kernel_sources(shapes, fitting, dtype=dtype, architectures=[architecture])


@each_operator
def test_tensors_that_do_not_fit_are_refused(
    operator: str, described: KernelDescription, interpreter: Interpreter
) -> None:
    layer, mask = replace(described.fitting, heads=2, head_dim=32), OPERATORS[operator].mask
    inputs, second = inputs_of(layer, row_of_kinds(20)), OPERATORS[operator].state_names[1]
    wrong = [
        (
            second,
            inputs[second].half(),
            rf"{second} is torch.float16 \[1, 20, 2, 32\] .* torch.float32, contiguous along",
        ),
        (
            "value",
            inputs["value"].mT.contiguous().mT,
            r"value is .*strides \[1280, 64, 1, 2\]; .* contiguous along head_dim",
        ),
        ("value", inputs["value"][:, :, :1].contiguous(), r"are .*, \[1, 20, 1, 32\] and"),
        (mask, inputs[mask].long(), rf"{mask} is torch.int64 .*{inputs[mask].dtype}"),
        (mask, row_of_kinds(21).to(inputs[mask].dtype), rf"{mask} is \[1, 21\]"),
    ]
    if isinstance(layer, Blocks):
        table = torch.zeros(3, 1, 1, dtype=torch.int32)
        wrong += [
            ("listed_blocks", table[:2].long(), "listed_blocks is torch.int64 .* torch.int32, contiguous"),
            ("listed_blocks", table, r"listed_blocks is \[3, 1, 1\]; for 2 heads"),
        ]
    if isinstance(layer, Lsh):
        half, short = inputs["rotations"].half(), inputs["rotations"][:, :, :1].contiguous()
        wrong += [
            ("rotations", half, "rotations is torch.float16 .* torch.float32, contiguous"),
            ("rotations", short, r"rotations is \[2, 32, 1, 10\]; it must be .*, \[2, 32, 4, 10\]"),
        ]
    for name, tensor, message in wrong:
        with pytest.raises(ValueError, match=message):
            answer_of(interpreter, layer, {**inputs, name: tensor})


def fitting(operator: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """An operator's implementation, and attributes for twelve heads of 64, some of them changed."""
    return plugin_spec_of(OPERATORS[operator]), KERNELS[operator].fitting.node_attributes | changes


def test_the_workspace_of_lsh_attention_never_shrinks_with_the_text_and_is_linear_in_tokens() -> None:
    def total(tokens: int, **changes: Any) -> int:
        spec, attributes = fitting("LSHAttention", **changes)
        return sum(spec.workspace([(1, tokens, 12, 64)], attributes).values())

    for changes in ({}, {"rounds": 1}, {"buckets": (32, 64)}):
        sizes = [total(tokens, **changes) for tokens in range(1, 3000)]
        assert sizes == sorted(sizes)
        # Per token, head and round: a hash, a place in the order and four counts; and a factor and a sum of values.
        rounds = changes.get("rounds", 4)
        assert total(65536, **changes) <= 65536 * 12 * (rounds * 4 * 6 + 4 + (4 * 66 if rounds > 1 else 0))
    # Each text and round has all counts, however short it is.
    assert total(1, buckets=(512,)) >= 12 * 4 * 4 * 513


def test_a_text_whose_answer_is_compared_is_in_parts() -> None:
    """The rows that see all are computed in parts where they would be the last to end, and then combined."""
    spec, attributes = fitting("BlockSparseAttention", block_size=128, dense_tokens=100, ends_by_row=1)
    shapes = shapes_of("BlockSparseAttention", (1, 520, 1, 32))
    constants = spec.constants(shapes, attributes, dtype="float16", block_config=BlockConfig(64, 64, 4, 3, 64))
    last = spec.launches(shapes, attributes, constants=constants)[-1]
    assert (last.kernel, last.scalars["splits"]) == ("combine", 2)


def test_the_workspace_of_blocks_never_shrinks_with_the_shape_and_is_linear_in_tokens() -> None:
    def total(batch: int, tokens: int, table: tuple[int, ...] | None = None, **changes: Any) -> int:
        spec, attributes = fitting("BlockSparseAttention", **changes)
        shapes = shapes_of("BlockSparseAttention", (batch, tokens, 12, 64), table)
        return sum(spec.workspace(shapes, attributes).values())

    for changes in ({}, {"ends_by_row": 1}, {"first_global": 40}, {"window": 9}):
        sizes = [total(1, tokens, **changes) for tokens in range(1, 2000)]
        assert sizes == sorted(sizes)
    assert total(1, 1000) < total(2, 1000)
    assert total(1, 1000, (1, 9, 3)) < total(1, 1000, (12, 9, 3)) < total(1, 1000, (12, 9, 4))
    assert total(1, 32768, (12, 510, 3)) <= 2 * total(1, 16384, (12, 254, 3))
