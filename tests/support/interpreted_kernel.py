"""The attention kernels run by Triton's interpreter on the CPU, in a process of its own.

Triton decides at its import whether it interprets, and other tests may have imported it by then.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import TracebackType
from typing import Any, TypeVar

import torch

from hdplugins import OPERATORS
from hdplugins.attention.plugin_spec import plugin_spec_of
from hdplugins.kernels.block_config import BlockConfig

Inputs = Mapping[str, torch.Tensor]
"""The inputs of an operator by name, in its order; optional ones may be left out."""

_Result = TypeVar("_Result")

_GUARD = 256
"""Elements before and after every buffer that a kernel writes, which it must leave alone."""

_UNSET_BYTE = 0xFF
"""Values that workspaces are filled with: NaN as floating-point numbers, -1 as integers."""


class Interpreter:
    """Runs the kernels; a context manager that owns the process."""

    def __enter__(self) -> Interpreter:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_interpret)
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._pool.shutdown()

    def run(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """A function's answer there."""
        return self._pool.submit(function, *arguments).result()

    def attention(
        self,
        operator: str,
        inputs: Inputs,
        *,
        block_config: BlockConfig,
        attributes: Mapping[str, Any],
        out_strides: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The operator's result, and the workspaces by name; they hold NaN before, and nothing else may be written.

        The result is contiguous where no strides are given.
        """
        return self.run(_attention, operator, dict(inputs), block_config, dict(attributes), out_strides)


def guarded(
    run: Callable[..., None],
    inputs: Inputs,
    sizes: Mapping[str, int],
    out_strides: Sequence[int] | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The values that `run` wrote into an output and workspaces, and that it wrote to nothing else."""
    query = next(iter(inputs.values()))
    strides = torch.empty(query.shape, device="meta").stride() if out_strides is None else out_strides
    length = 1 + sum(stride * (size - 1) for stride, size in zip(strides, query.shape, strict=True))
    guarded_out = torch.full((length + 2 * _GUARD,), torch.nan, dtype=query.dtype)
    out = guarded_out.as_strided(query.shape, strides, _GUARD)
    buffers = {name: torch.full((size + 2 * _GUARD,), _UNSET_BYTE, dtype=torch.uint8) for name, size in sizes.items()}
    before = [tensor.clone() for tensor in inputs.values()]
    workspaces = {name: buffer[_GUARD:-_GUARD] for name, buffer in buffers.items()}
    run(out=out, **workspaces)
    result = out.clone()
    out.fill_(torch.nan)
    assert torch.isnan(guarded_out).all(), "the kernel wrote outside its output"
    for buffer in buffers.values():
        for guard in (buffer[:_GUARD], buffer[-_GUARD:]):
            assert (guard == _UNSET_BYTE).all(), "the kernel wrote outside its workspace"
    for tensor, was in zip(inputs.values(), before, strict=True):
        assert torch.equal(tensor.nan_to_num(), was.nan_to_num()), "the kernel wrote to an input"
    return result, {name: workspace.clone() for name, workspace in workspaces.items()}


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    _patch_the_language_once_a_launch()
    _leave_out_checks_of_overflow()


def _leave_out_checks_of_overflow() -> None:
    """Triton's interpreter computes for each sum of integers whether it overflows, and drops the result.

    `device_assert` does nothing unless ``debug`` is set. The checks take a third of the time.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "overflows are reported, so that the checks are worth their time"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patch_the_language_once_a_launch() -> None:
    """Triton's interpreter does so at each call of a function by a kernel, which takes a third of its time."""
    from triton.runtime import interpreter

    patch = interpreter._patch_builtin

    def patch_if_not_yet(package: Any, builder: Any, scope: Any) -> None:
        if "_is_interpreted" not in vars(package):
            patch(package, builder, scope)
            # As long as the patches: a launch takes back settings of its scope.
            scope.set_attr(package, "_is_interpreted", True)

    interpreter._patch_builtin = patch_if_not_yet


def _attention(
    operator: str,
    inputs: dict[str, torch.Tensor],
    block_config: BlockConfig,
    attributes: dict[str, Any],
    out_strides: Sequence[int] | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    from hdplugins.attention.kernel_launch import launch

    def run(out: torch.Tensor, **scratch: torch.Tensor) -> None:
        launch(
            OPERATORS[operator], list(inputs.values()), out, scratch, block_config=block_config, attributes=attributes
        )

    shapes = [tuple(tensor.shape) for tensor in inputs.values()]
    return guarded(run, inputs, plugin_spec_of(OPERATORS[operator]).workspace(shapes, attributes), out_strides)
