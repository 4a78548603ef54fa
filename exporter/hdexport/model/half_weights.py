"""Half-precision weights that stay in the checkpoint's files, mapped, while their model computes in float32.

A weight in bfloat16 or float16 is exact in float32, so outputs equal the outputs of float32 weights to the bit.
Float32 copies of all weights would take twice the memory of the files.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hdexport.model.experts import experts_of

HALF = (torch.float16, torch.bfloat16)

MIN_MODEL_BYTES = 256 * 2**20
"""Bytes of half-precision weights from which a model keeps them.

Half-precision weights halve a bundle of any size and slow no session down. A float32 session in OpenVINO takes more
memory with them at 110 million parameters (0.89 GB, 0.76 with float32 weights) and less at 250 million (1.08 GB, 1.60);
one in bfloat16 takes 0.37 GB at 110 million, 0.73 with float32 weights. ``benchmarks.cpu.weights_dtype``, OpenVINO
2026.4.1, an AMD EPYC with bfloat16, 2026-11-29.
"""

_MIN_WEIGHT_BYTES = 2**16
"""More than the passes of a trace compute with or merge by value, see `VirtualWeights`."""

_HALF_BYTES = 2

_NAN_VALUES = 1024

_OF_MODULES = (torch.nn.Linear, torch.nn.Embedding)
"""Modules whose weights are kept. Changes to a model compute with other weights, such as tables of positions."""


def kept_in_half(shapes: Mapping[str, Sequence[int]]) -> frozenset[str]:
    """Names of the weights that keep half precision: large matrices, and experts' stacks of such matrices, if they are
    large together.

    Args:
        shapes: name -> shape of each half-precision weight that a model takes.
    """
    sizes = {name: _HALF_BYTES * math.prod(shape) for name, shape in shapes.items() if len(shape) in (2, 3)}
    large = {
        name: size for name, size in sizes.items() if _HALF_BYTES * math.prod(shapes[name][-2:]) >= _MIN_WEIGHT_BYTES
    }
    return frozenset(large) if sum(large.values()) >= MIN_MODEL_BYTES else frozenset()


def halve_experts(model: torch.nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Put experts' weights back in half precision, in place, where float32 is a copy of their files' values.

    transformers stacks the weights of single experts while it loads them, in float32.

    Args:
        model: the model.
        dtypes: name -> dtype of the weights in the files.
    """
    for prefix, module in experts_of(model).items():
        for name, weight in module._parameters.items():
            dtype = dtypes.get(f"{prefix}.{name}")
            if weight is None or dtype is None or weight.dim() != 3:
                continue
            half = weight.detach().to(dtype)
            if all(torch.equal(part.float(), whole) for part, whole in zip(half, weight.detach(), strict=True)):
                module._parameters[name] = torch.nn.Parameter(half, requires_grad=False)


class MappedWeights:
    """The weights of a model's files; large weights in half precision stay in the files.

    Args:
        state: name -> weight as the file has it, mapped.
        kept: names of the weights that stay in the files; see `kept_in_half`.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], *, kept: frozenset[str]) -> None:
        half = {name: state[name] for name in kept}
        self._state = state
        # A placeholder has all its values at one address.
        self._placeholders = {name: torch.zeros(()).expand(weight.shape) for name, weight in half.items()}
        self._half = {self._placeholders[name].data_ptr(): weight for name, weight in half.items()}

    @property
    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the model is loaded from: placeholders without memory for weights that stay in the files."""
        return {**self._state, **self._placeholders}

    def put_into(self, model: torch.nn.Module) -> None:
        """Replace the placeholders among a model's parameters and buffers by the mapped weights, in place.

        Buffers, and weights of other modules than `_OF_MODULES` and experts, become float32.
        """
        experts = {*experts_of(model).values()}
        owners: dict[torch.nn.Parameter, list[tuple[torch.nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.data_ptr() in self._half:
                    owners.setdefault(parameter, []).append((module, name))
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.data_ptr() in self._half:
                    module._buffers[name] = self._half[buffer.data_ptr()].float()
        for parameter, places in owners.items():
            weight = self._half[parameter.data_ptr()]
            of_experts = weight.dim() == 3 and all(module in experts for module, _ in places)
            if not (of_experts or all(isinstance(module, _OF_MODULES) and name == "weight" for module, name in places)):
                weight = weight.float()
            mapped = torch.nn.Parameter(weight, requires_grad=False)
            for module, name in places:
                module._parameters[name] = mapped


class UpcastWeights(TorchFunctionMode):
    """Inside this context, PyTorch computes with float32 copies of half-precision tensors, one at a time.

    1. Rows of an embedding table are upcast after they are read.
    2. Attributes such as shapes and transposes, and parts such as one expert's weight, are those of the stored tensor;
       its dtype reads as float32, since models cast states to the dtype of a weight.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.dtype.__get__:  # type: ignore[attr-defined]
            dtype = func(*args)
            return torch.float32 if dtype in HALF else dtype
        if func is torch.nn.functional.embedding:  # 1
            return _upcast(func(*args, **kwargs))
        if getattr(func, "__name__", "") in ("__get__", "__set__", "__getitem__"):  # 2
            return func(*args, **kwargs)
        return func(*map(_upcast, args), **{name: _upcast(value) for name, value in kwargs.items()})


def upcast_in_forward(model: PreTrainedModel) -> None:
    """Make a model whose weights are in half precision compute in float32 whenever it is called, in place."""
    forward = model.forward

    @functools.wraps(forward)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        with UpcastWeights():
            return forward(*args, **kwargs)

    model.forward = in_float32


def use_bfloat16(model: PreTrainedModel) -> None:
    """Make a model compute in bfloat16, in place, as one that transformers loads so: its buffers stay."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)


class VirtualWeights:
    """Float32 parameters without memory in the place of a module's half-precision weights, for a trace.

    Their first values are NaN: a constant that a trace computes with them, and is no view of them, has NaN.

    Args:
        module: the module; its half-precision weights are replaced.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._half: dict[int, torch.Tensor] = {}
        made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is None or parameter.dtype not in HALF:
                    continue
                if parameter not in made:
                    # Nothing else is written, so the operating system provides no more of this memory.
                    virtual = torch.empty(parameter.shape, dtype=torch.float32)
                    virtual.view(-1)[:_NAN_VALUES] = torch.nan
                    made[parameter] = torch.nn.Parameter(virtual, requires_grad=False)
                    self._half[virtual.data_ptr()] = parameter.detach()
                owner._parameters[name] = made[parameter]
        self._made = tuple(made.values())

    def __bool__(self) -> bool:
        return bool(self._made)

    def half_of(self, array: np.ndarray[Any, Any]) -> torch.Tensor | None:
        """The part of a half-precision weight that a float32 array, a view of a virtual weight, stands for.

        None for an array that is no view of a virtual weight.
        """
        half = self._half.get(array.__array_interface__["data"][0])
        if half is None or array.dtype != "float32":
            return None
        return half.as_strided(array.shape, [stride // array.itemsize for stride in array.strides])


def _upcast(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in HALF else value
    if isinstance(value, (list, tuple)) and any(isinstance(each, torch.Tensor) for each in value):
        return type(value)(map(_upcast, value))
    return value
