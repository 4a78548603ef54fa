"""An operator's kernels started by Triton, on tensors of PyTorch: for tests and benchmarks, without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hdplugins.attention.operator import Operator
from hdplugins.attention.plugin_face import Attributes, face_of, sizes
from hdplugins.kernels.attention_tiles import Tiles

if TYPE_CHECKING:
    import torch

_SCRATCH_DTYPES = {"i32": "int32", "fp32": "float32"}


def launch(
    operator: Operator,
    inputs: Sequence[torch.Tensor | None],
    out: torch.Tensor,
    scratch: Mapping[str, torch.Tensor],
    *,
    tiles: Tiles,
    attributes: Attributes,
    is_planned: bool = False,
) -> None:
    """Run the kernels on tensors of one GPU, or on CPU tensors where Triton interprets. Nothing is allocated.

    A ValueError says that a tensor or an attribute does not fit.

    Args:
        inputs: of the operator, in order, as its `reference` takes them; None for one that is left out. States may have
            any strides that `PluginFace.launches` takes, others are contiguous.
        out: of the shape and type of the first input, overwritten throughout; its strides may be others.
        scratch: the buffers that the face's `workspace` lists, uint8, at least as large.
        attributes: of the operator, all of them.
        is_planned: whether `scratch` holds the plan of an earlier call, which layers of a model may share.
    """
    import torch  # which compilers do without

    face, query = face_of(operator), inputs[0]
    assert query is not None
    given = {name: tensor for name, tensor in zip(operator.inputs, inputs, strict=False) if tensor is not None}
    dtypes = dict(zip(operator.inputs, face.INPUT_DTYPES, strict=True))
    strided = {name: given[name] for name in operator.state_names} | {face.OUTPUT: out}
    for name, tensor in {**given, **strided}.items():
        wanted = getattr(torch, dtypes.get(name) or "", query.dtype)
        is_fit = tensor.stride()[-1:] == (1,) if name in strided else tensor.is_contiguous()
        if tensor.dtype != wanted or not is_fit:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}; it should be "
                f"{wanted}, contiguous{' along head_dim' if name in strided else ''}."
            )
    if out.shape != query.shape:
        raise ValueError(f"{face.OUTPUT} is {list(out.shape)}; it should be {list(query.shape)}, like the query.")
    shapes = [tuple(tensor.shape) for tensor in given.values()]
    face.check(shapes, attributes)
    for name, needed in face.workspace(shapes, attributes).items():
        buffer = scratch[name]
        if buffer.dtype != torch.uint8 or buffer.numel() < needed:
            raise ValueError(f"{name} is {buffer.numel()} x {buffer.dtype}; it should be {needed} x torch.uint8.")
    buffers = {name: scratch[name].view(getattr(torch, _SCRATCH_DTYPES[kind])) for name, kind in face.SCRATCH.items()}
    tensors = {**given, **buffers, face.OUTPUT: out}
    constants = face.constants(shapes, attributes, dtype=str(query.dtype).removeprefix("torch."), tiles=tiles)
    kernels = operator.face("kernel")
    strides = {name: sizes(tensor.stride())[:3] for name, tensor in strided.items()}
    for step in face.launches(shapes, attributes, constants=constants, strides=strides):
        if is_planned and step.kernel in face.planning_kernels:
            continue
        pointers = {name: tensors.get(name) for name in face.POINTERS[step.kernel]}
        compiled = face.compiled_with(step.kernel, tiles)
        getattr(kernels, step.kernel)[step.grid](**pointers, **step.scalars, **constants[step.kernel], **compiled)
