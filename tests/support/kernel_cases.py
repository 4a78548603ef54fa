"""What tests of all kernels and plugins ask of an operator, and their calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hdplugins import Operator
from hdplugins.attention.kernel_launch import launch
from hdplugins.attention.plugin_spec import plugin_spec_of
from hdplugins.kernels.block_config import BlockConfig
from support.attention_layers import Layer
from support.interpreted_kernel import Inputs

KERNEL_DTYPES = ("float32", "float16")
"""Types without bfloat16: Triton's interpreter (3.7.1 and 3.9.0) multiplies its bit patterns as integers."""


@dataclass(frozen=True, kw_only=True)
class KernelDescription:
    """The kernel of one operator, for tests of all kernels and plugins."""

    block_config: BlockConfig  # small ones: short texts then have blocks of every sort, at the edges and between them
    cases: Sequence[Any]  # layer, kinds, tiles and size of the queries, whose answers must be right
    # a node, tokens, the first key that holds NaN, the end of the queries that must not see it, and the first of
    # the queries that do; None where hashes decide which keys are seen
    not_loaded: tuple[Layer, int, int, int, int] | None
    fitting: Layer  # a node with twelve heads of 64 that kernels can be launched for
    # attributes, and the shape of a query or of the last input -> the message that refuses a launch
    refused: Sequence[tuple[dict[str, Any], str]]


def inputs_of(layer: Layer, kinds: torch.Tensor, *, size: float = 1.0) -> Inputs:
    """Random states, and a mask of its type; a query of padding is NaN where its answer is 0 with any content."""
    (batch, tokens), names = kinds.shape, layer.operator.state_names
    shapes = [(batch, tokens, layer.heads_of(name), layer.head_dim) for name in names]
    generator = torch.Generator().manual_seed(math.prod(shapes[0]))
    dtype = getattr(torch, layer.dtype)
    query, *others = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    query = layer.decided(query) * size
    if not layer.answers_padding:
        query = query.masked_fill((kinds == 0)[:, :, None, None], torch.nan)
    typed = (query, *others)
    states = dict(zip(names, typed, strict=True))
    tables = map(torch.from_numpy, layer.constants.values())
    mask = kinds != 0 if plugin_spec_of(layer.operator).INPUT_DTYPES[len(names)] == "bool" else kinds
    return states | dict(zip(layer.operator.inputs[len(names) :], (mask, *tables), strict=False))


def right_answers(layer: Layer, inputs: Inputs, dtype: torch.dtype = torch.float64, **changes: Any) -> torch.Tensor:
    """The answer by the definition."""
    states = [inputs[name].nan_to_num().to(dtype) for name in layer.operator.state_names]
    return layer.by_definition(states, inputs, **changes)


def answer_of_gpu(operator: Operator, inputs: Inputs, attributes: Mapping[str, Any]) -> torch.Tensor:
    """The kernels' results on the machine's GPU, with its tiles; skips a test where PyTorch has no CUDA."""
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    on_gpu, spec = [tensor.cuda() for tensor in inputs.values()], plugin_spec_of(operator)
    shapes, dtype = [tuple(tensor.shape) for tensor in on_gpu], str(on_gpu[0].dtype).removeprefix("torch.")
    sizes = spec.workspace(shapes, attributes)
    scratch = {name: torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for name, size in sizes.items()}
    major, minor = torch.cuda.get_device_capability()
    block_config = spec.block_config(shapes, attributes, dtype=dtype, architecture=10 * major + minor)
    out = torch.full_like(on_gpu[0], torch.nan)
    launch(operator, on_gpu, out, scratch, block_config=block_config, attributes=attributes)
    return out.cpu()


def block_config_of_gpu(layer: Layer) -> BlockConfig:
    """A node's tiles for sm_86."""
    shapes = [(1, 1, 1, layer.head_dim)] * layer.operator.states
    return plugin_spec_of(layer.operator).block_config(
        shapes, layer.node_attributes, dtype=layer.dtype, architecture=86
    )


def kernel_case(
    *name: object,
    layer: Layer,
    kinds: torch.Tensor,
    block_config: BlockConfig | None = None,
    size: float = 1.0,
    is_nightly: bool = False,
) -> Any:
    """A call of a kernel: mask or kinds of tokens, [batch, tokens], and tiles, None for small ones."""
    marks = pytest.mark.nightly if is_nightly else ()
    return pytest.param(layer, kinds, block_config, size, id=" ".join(map(str, name)), marks=marks)


def row_of_kinds(tokens: int, globals_: Sequence[int] = (), padding: Sequence[int] = ()) -> torch.Tensor:
    """[1, tokens]"""
    row = torch.ones(1, tokens, dtype=torch.int32)
    row[0, list(globals_)] = 2
    row[0, list(padding)] = 0
    return row
