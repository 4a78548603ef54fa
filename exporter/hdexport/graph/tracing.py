"""A PyTorch model becomes an ONNX graph with dynamic batch and tokens."""

from __future__ import annotations

import logging
import re
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hdexport.graph.branches import lengths_of_branches
from hdexport.graph.passes.module_names import name_transposed_weights
from hdexport.graph.passes.optimize import optimize
from hdexport.graph.passes.repeat_layers import repeat_layers
from hdexport.graph.passes.tokens_first import tokens_first
from hdexport.graph.repeated_layers import layers_traced_once
from hdexport.model.graph_module import GraphModule, argument_name, named_arguments
from hdexport.support.process_settings import only_errors_of
from hdplugins import ONNX_OPSET
from hdruntime.bundle.manifest import InputSpec, Role
from hdruntime.errors import ExportError

if TYPE_CHECKING:
    import onnx_ir

logger = logging.getLogger(__name__)

EXPORTER_LOGGER = "torch.onnx._internal.exporter._registration"
"""It warns of packages that no model of ours needs, such as torchvision."""

# Not a length, batch or block size that anything else uses, so that a frozen size shows at once.
_TRACED_BATCH, _TRACED_TOKENS, _TRACED_MEMORY = 2, 37, 23

# An axis of size 1 is always frozen.
_FEWEST_TRACED_TOKENS = 2

_DYNAMIC_AXES = ("batch", "tokens", "memory")

_COUNT = re.compile(r"\bu\d+\b")
"""PyTorch's name of a number that depends on values."""


class Trace(NamedTuple):
    """The graph of a module, and the lengths at which it may be wrong; see `lengths_of_branches`."""

    model: onnx_ir.Model
    branches: tuple[int, ...]


def trace(module: GraphModule, *, max_len: int, vocab_size: int) -> Trace:
    """Export a module in evaluation mode: a graph with its inputs, whose attentions are nodes of the domain
    ``hdexport``, without function bodies. A frozen axis is an ExportError.

    `max_len` is the longest input that the position table serves; ids of the example input stay below `vocab_size`.
    """
    examples = _examples(module, max_len=max_len, vocab_size=vocab_size)
    try:
        with (
            torch.inference_mode(),
            warnings.catch_warnings(),
            only_errors_of(EXPORTER_LOGGER),
            named_arguments(module),
            layers_traced_once(module),
        ):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module,
                kwargs=examples,
                dynamo=True,
                opset_version=ONNX_OPSET,
                verbose=False,
                dynamic_shapes=_dynamic_shapes(module),
                input_names=[spec.name for spec in module.inputs],
                output_names=list(module.outputs),
                optimize=False,  # not before it is whole
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise ExportError(
            f"PyTorch could not export the model: {_root_cause(error)}",
            hint="A family can compute that step otherwise (CONTRIBUTING.md, Add a model family).",
        ) from error
    if program is None:
        raise ExportError("PyTorch's exporter returned no graph.", hint="Try a newer one: pip install -U torch")
    assert program.exported_program is not None
    ids = [spec.role for spec in module.inputs].index(Role.IDS)
    branches = lengths_of_branches(program.exported_program, ids, max_len=max_len)
    if branches:
        logger.info("the model's code compares the number of tokens at %s", ", ".join(map(str, branches)))
    copies = repeat_layers(program.model)
    logger.debug("%d layers repeat one that was traced.", copies)
    name_transposed_weights(program.model)
    optimize(program.model)
    saved = tokens_first(program.model)
    logger.debug("%d nodes fewer transpose heads and tokens.", saved)
    _forget_counts(program.model)
    _name_axes(program.model, module)
    return Trace(program.model, branches)


def _examples(module: GraphModule, *, max_len: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Arguments by name: random ids, masks of ones, and 0 for all others."""
    generator = torch.Generator().manual_seed(0)
    tokens = max(_FEWEST_TRACED_TOKENS, min(_TRACED_TOKENS, max_len))
    ids = torch.randint(0, vocab_size, (_TRACED_BATCH, tokens), generator=generator)
    made = {
        Role.IDS: ids,
        Role.MASK: torch.ones_like(ids),
        Role.POOLED: torch.ones_like(ids),
        Role.ATTENDED: torch.ones_like(ids),
    }
    return {
        argument_name(spec): torch.zeros(_memory_sizes(spec))
        if spec.role is Role.RECURRENT_STATE
        else made.get(spec.role, torch.zeros_like(ids))
        for spec in module.inputs
    }


def _memory_sizes(spec: InputSpec) -> list[int]:
    sizes = {"batch": _TRACED_BATCH, "memory": min(_TRACED_MEMORY, spec.bound or _TRACED_MEMORY)}
    return [axis if isinstance(axis, int) else sizes[axis] for axis in spec.shape]


def _dynamic_shapes(module: GraphModule) -> dict[str, Any]:
    """The axes with names, by argument.

    AUTO rather than a Dim: with a Dim the exporter insists on proving bounds, which differ by family; that no axis was
    frozen is checked on the graph.
    """
    return {
        argument_name(spec): {
            index: torch.export.Dim.AUTO for index, axis in enumerate(spec.shape) if isinstance(axis, str)
        }
        for spec in module.inputs
    }


def _root_cause(error: BaseException) -> str:
    """The first error; the exporter wraps it in pages of advice on changing the model's code."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _forget_counts(model: onnx_ir.Model) -> None:
    """Leave out sizes that depend on values, such as the number of an expert's tokens. A layer that repeats another has
    such sizes by the same names, and ONNX Runtime would give values of one name one buffer."""
    import onnx_ir as ir

    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.shape is not None:
                value.shape = ir.Shape([None if _COUNT.search(str(axis)) else axis for axis in value.shape])


def _name_axes(model: onnx_ir.Model, module: GraphModule) -> None:
    """Name the dynamic axes of inputs and outputs, and refuse frozen ones."""
    import onnx_ir as ir

    specs = {spec.name: spec.shape for spec in module.inputs}
    named = [(value, specs[str(value.name)]) for value in model.graph.inputs]
    for value, axes in (*named, *zip(model.graph.outputs, module.outputs.values(), strict=True)):
        assert value.shape is not None
        dynamic = {index for index, axis in enumerate(axes) if axis in _DYNAMIC_AXES}
        for index in dynamic:
            if isinstance(value.shape[index], int):
                raise ExportError(
                    f"The exporter froze axis {index} of {value.name} to {value.shape[index]}; "
                    "a graph that is right at one length only is of no use.",
                    hint="Please report the model and the versions that `hdexport doctor` prints.",
                )
        value.shape = ir.Shape([axis if index in dynamic else value.shape[index] for index, axis in enumerate(axes)])
