"""The GPU kernels, interpreted, give one answer wherever states lie, and write their output where it lies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hdplugins.attention.operator import Operator
from hdplugins.attention.plugin_spec import plugin_spec_of, sizes, stride_names
from hdplugins.kernels.block_config import BlockConfig
from support.attention_layers import Layer, token_kinds
from support.comparators import named_case
from support.described_operators import WITH_KERNELS
from support.interpreted_kernel import Inputs, Interpreter
from support.kernel_cases import inputs_of
from support.operators import distance, relative
from support.operators.blocks import Blocks
from support.operators.chunks import Chunks
from support.operators.dense import Dense
from support.operators.distance import Clipped
from support.operators.lsh import Lsh
from support.operators.relative import Relative, key_kinds
from support.operators.window import Window

pytest.importorskip("triton", reason="the kernel is written in Triton, which has no wheel for this platform")

AXIS = sizes(range(4))
"""The number of each axis of a state."""

TOKENS_FIRST = (AXIS.batch, AXIS.tokens, AXIS.heads, AXIS.head_dim)
HEADS_FIRST = (AXIS.batch, AXIS.heads, AXIS.tokens, AXIS.head_dim)

BLOCK_CONFIG = BlockConfig(16, 16, 4, 2, 64)
"""A head of 80 is then in two parts."""

KINDS = token_kinds("holes", 37, globals_="scattered", bound=3, batch=2)


def tensors(arrays: Mapping[str, np.ndarray]) -> Inputs:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def of_sparse(layer: Any, kinds: np.ndarray) -> tuple[Layer, Inputs]:
    return layer, inputs_of(layer, torch.from_numpy(kinds))


CLIPPED = Clipped(by_query=True, values=True, head_dim=80)
RELATIVE = Relative(head_dim=80)
CALLS: tuple[tuple[Layer, Inputs], ...] = (
    of_sparse(Window(left=9, right=5, dilation=(1, 1, 3, 3), heads=4, kv_heads=2, bound=3, head_dim=80), KINDS),
    # So long that the keys of queries that see all are in parts, whose answers another kernel writes.
    of_sparse(Blocks(block=128, head_dim=80), token_kinds("right", 520, batch=2)),
    of_sparse(Chunks(chunk=16, after=1, head_dim=80), np.minimum(KINDS, 1)),
    of_sparse(Dense(heads=4, kv_heads=2, head_dim=80), np.minimum(KINDS, 1)),
    of_sparse(Lsh(chunk=16, head_dim=80), np.minimum(KINDS, 1)),
    (CLIPPED, tensors(distance.inputs_of(CLIPPED, np.minimum(KINDS, 1)))),
    (RELATIVE, tensors(relative.inputs_of(RELATIVE, key_kinds("holes", 37, 7, batch=2), 37))),
)
"""An operator's node, and inputs of several texts and heads."""

each_call = pytest.mark.parametrize(("layer", "inputs"), CALLS, ids=[layer.operator.name for layer, _ in CALLS])


def in_memory(state: torch.Tensor, order: tuple[int, ...], *, gap: int = 0) -> torch.Tensor:
    """The state, whose axes follow each other in memory in an order; NaN is in the gaps behind tokens and rows."""
    room = [
        size + gap * ((axis == AXIS.tokens) + 16 * (axis == AXIS.head_dim)) for axis, size in enumerate(state.shape)
    ]
    memory = torch.full([room[axis] for axis in order], torch.nan, dtype=state.dtype)
    found = memory.permute(*np.argsort(order).tolist())[tuple(map(slice, state.shape))]
    return found.copy_(state)


def padded(states: Inputs) -> Inputs:
    """Each with gaps of its own."""
    return {name: in_memory(state, HEADS_FIRST, gap=gap) for gap, (name, state) in enumerate(states.items(), 1)}


def packed(states: Inputs) -> Inputs:
    """All but the output as parts of one tensor, [batch, tokens, heads of all, head_dim]."""
    parts = {name: state.permute(TOKENS_FIRST) for name, state in states.items() if name != "out"}
    tokens, heads = max(part.shape[1] for part in parts.values()), [part.shape[2] for part in parts.values()]
    (batch, *_, head_dim), dtype = next(iter(parts.values())).shape, states["out"].dtype
    memory = torch.full((batch, tokens, sum(heads), head_dim), torch.nan, dtype=dtype)
    places = [memory[:, : part.shape[1], end - part.shape[2] : end]
              for part, end in zip(parts.values(), itertools.accumulate(heads), strict=True)]  # fmt: skip
    back = np.argsort(TOKENS_FIRST).tolist()
    found = {name: place.copy_(part).permute(*back) for place, (name, part) in zip(places, parts.items(), strict=True)}
    return {**found, "out": in_memory(states["out"], TOKENS_FIRST)}


LAYOUTS: dict[str, Callable[[Inputs], Inputs]] = {
    "tokens first": lambda states: {name: in_memory(state, TOKENS_FIRST) for name, state in states.items()},
    "heads first": lambda states: {name: in_memory(state, HEADS_FIRST) for name, state in states.items()},
    "packed": packed,
    "padded": padded,
}
"""Of states and the output; one of the first two is contiguous."""


def states_of(operator: Operator, inputs: Inputs) -> Inputs:
    """And an output."""
    states = {name: inputs[name] for name in operator.state_names}
    return {**states, "out": torch.zeros_like(inputs[operator.inputs[0]])}


def test_every_operator_with_a_kernel_is_called() -> None:
    assert {layer.operator.name for layer, _ in CALLS} == WITH_KERNELS


@each_call
def test_an_operator_gives_the_same_answer_in_every_layout(
    layer: Layer, inputs: Inputs, interpreter: Interpreter
) -> None:
    """Rows are read from where they are, and nothing is written between those of the output, as `guarded` demands."""
    operator, attributes = layer.operator, layer.node_attributes
    block_config = (
        BLOCK_CONFIG
        if layer.operator.name != "BlockSparseAttention"
        else replace(BLOCK_CONFIG, block_m=128, block_n=128)
    )
    wanted, _ = interpreter.attention(operator.name, inputs, block_config=block_config, attributes=attributes)
    assert not wanted.isnan().any()
    assert len(wanted.flatten().unique()) > wanted.numel() // 3
    for name, laid_out in LAYOUTS.items():
        *states, (_, out) = laid_out(states_of(operator, inputs)).items()
        given = {**inputs, **dict(states)}
        actual, _ = interpreter.attention(
            operator.name, given, block_config=block_config, attributes=attributes, out_strides=out.stride()
        )
        with named_case(name):
            assert torch.equal(actual, wanted)


@each_call
def test_one_machine_code_serves_every_layout(layer: Layer, inputs: Inputs) -> None:
    """Launches differ in strides alone, of which the kernels are promised what all layouts keep."""
    operator, attributes, spec = layer.operator, layer.node_attributes, plugin_spec_of(layer.operator)
    shapes = [tuple(tensor.shape) for tensor in inputs.values()]
    constants = spec.constants(shapes, attributes, dtype="float32", block_config=BLOCK_CONFIG)
    sources = spec.kernel_sources(shapes, attributes, dtype="float32", architectures=[80])
    arguments = {
        source.function: [name for name, kind in source.signature.items() if kind[0] != "*"] for source in sources
    }
    aligned = {source.function: source.aligned for source in sources}
    usual, seen = spec.launches(shapes, attributes, constants=constants), set()
    for name, laid_out in LAYOUTS.items():
        strides = {name: sizes(state.stride())[:3] for name, state in laid_out(states_of(operator, inputs)).items()}
        launches = spec.launches(shapes, attributes, constants=constants, strides=strides)
        with named_case(name):
            for launch, contiguous in zip(launches, usual, strict=True):
                assert (launch.kernel, launch.grid) == (contiguous.kernel, contiguous.grid)
                assert sorted(launch.scalars) == sorted(arguments[launch.kernel])
                changed = {name for name, value in launch.scalars.items() if contiguous.scalars[name] != value}
                assert all(name in aligned[launch.kernel] and launch.scalars[name] % 16 == 0 for name in changed)
                seen |= changed
    assert seen == {*stride_names(*operator.state_names, "out")}


@each_call
def test_strides_that_kernels_do_not_support_are_refused(layer: Layer, inputs: Inputs) -> None:
    spec, attributes = plugin_spec_of(layer.operator), layer.node_attributes
    shapes = [tuple(tensor.shape) for tensor in inputs.values()]
    constants = spec.constants(shapes, attributes, dtype="float32", block_config=BLOCK_CONFIG)
    for name in (*layer.operator.state_names, "out"):
        for strides, message in (
            ((4096, 1024, 24), f"The stride of {name} along tokens is 24 elements; .* a multiple of 16, 0 or more"),
            ((4096, 1000, 80), f"The stride of {name} along heads is 1000 elements; .* a multiple of 16, 0 or more"),
            ((-4096, 1024, 80), f"The stride of {name} along batch is -4096 elements; .* a multiple of 16, 0 or more"),
            ((2**31, 80, 160), f"strides of {name}, .* are too large for one launch: they are at most 2147483647"),
            ((0, 80, 2**27), f"strides of {name}, .* the stride of tokens times [0-9]+ tokens"),
        ):
            with named_case(message), pytest.raises(ValueError, match=message):
                spec.launches(shapes, attributes, constants=constants, strides={name: strides})
    with pytest.raises(ValueError, match="There are strides of queries; the arrays with strides are"):
        spec.launches(shapes, attributes, constants=constants, strides={"queries": (4096, 1024, 80)})


def test_an_axis_of_one_entry_may_have_any_stride() -> None:
    (layer, inputs), *_ = CALLS
    spec, attributes = plugin_spec_of(layer.operator), layer.node_attributes
    shapes = [(1, *tensor.shape[1:]) for tensor in inputs.values()]
    constants = spec.constants(shapes, attributes, dtype="float32", block_config=BLOCK_CONFIG)
    _, attend, *_ = spec.launches(shapes, attributes, constants=constants, strides={"query": (2**40 + 1, 80, 320)})
    assert [attend.scalars[name] for name in stride_names("query")] == [0, 80, 320]
