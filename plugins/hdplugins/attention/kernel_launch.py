"""Launch an operator's kernels by Triton on PyTorch tensors: for tests and benchmarks, without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hdplugins.attention.operator import Operator
from hdplugins.attention.plugin_spec import Attributes, plugin_spec_of, sizes
from hdplugins.kernels.aot_worker import with_tuples
from hdplugins.kernels.block_config import BlockConfig

if TYPE_CHECKING:
    import torch

_SCRATCH_DTYPES = {"i32": "int32", "fp32": "float32"}


def launch(
    operator: Operator,
    inputs: Sequence[torch.Tensor | None],
    out: torch.Tensor,
    scratch: Mapping[str, torch.Tensor],
    *,
    block_config: BlockConfig,
    attributes: Attributes,
    has_block_index: bool = False,
) -> None:
    """Run the kernels on tensors of one GPU, or on CPU tensors if Triton interprets. Nothing is allocated.

    Args:
        inputs: inputs of the operator, in order; None for an input that is left out. States may have any strides that
            `PluginSpec.launches` accepts, other inputs are contiguous.
        out: output of the shape and dtype of the first input, overwritten as a whole; its strides may differ.
        scratch: the buffers of `PluginSpec.workspace`, uint8, at least as large.
        block_config: block config of `attend`.
        attributes: all attributes of the operator.
        has_block_index: whether `scratch` holds the block index of an earlier call, which layers of a model may share.

    Raises:
        ValueError: a tensor or an attribute does not fit.
    """
    import torch  # here: compilers do without PyTorch

    spec, query = plugin_spec_of(operator), inputs[0]
    assert query is not None
    present = {name: tensor for name, tensor in zip(operator.inputs, inputs, strict=False) if tensor is not None}
    dtypes = dict(zip(operator.inputs, spec.INPUT_DTYPES, strict=True))
    strided = {name: present[name] for name in operator.state_names} | {spec.OUTPUT: out}
    for name, tensor in {**present, **strided}.items():
        expected = getattr(torch, dtypes.get(name) or "", query.dtype)
        is_fit = tensor.stride()[-1:] == (1,) if name in strided else tensor.is_contiguous()
        if tensor.dtype != expected or not is_fit:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}; it should be "
                f"{expected}, contiguous{' along head_dim' if name in strided else ''}."
            )
    if out.shape != query.shape:
        raise ValueError(f"{spec.OUTPUT} is {list(out.shape)}; it should be {list(query.shape)}, like the query.")
    shapes = [tuple(tensor.shape) for tensor in present.values()]
    spec.check(shapes, attributes)
    for name, needed in spec.workspace(shapes, attributes).items():
        buffer = scratch[name]
        if buffer.dtype != torch.uint8 or buffer.numel() < needed:
            raise ValueError(f"{name} is {buffer.numel()} x {buffer.dtype}; it should be {needed} x torch.uint8.")
    buffers = {name: scratch[name].view(getattr(torch, _SCRATCH_DTYPES[kind])) for name, kind in spec.SCRATCH.items()}
    tensors = {**present, **buffers, spec.OUTPUT: out}
    constants = spec.constants(
        shapes, attributes, dtype=str(query.dtype).removeprefix("torch."), block_config=block_config
    )
    kernels = operator.implementation("kernel")
    strides = {name: sizes(tensor.stride())[:3] for name, tensor in strided.items()}
    for step in spec.launches(shapes, attributes, constants=constants, strides=strides):
        if has_block_index and step.kernel in spec.block_index_kernels:
            continue
        pointers = {name: tensors.get(name) for name in spec.POINTERS[step.kernel]}
        compiled = spec.compiled_with(step.kernel, block_config)
        getattr(kernels, step.kernel)[step.grid](
            **pointers, **with_tuples(step.scalars), **constants[step.kernel], **compiled
        )
