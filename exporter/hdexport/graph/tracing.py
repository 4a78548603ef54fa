"""Trace a PyTorch model to an ONNX graph with dynamic batch and tokens."""

from __future__ import annotations

import logging
import re
import warnings
from typing import Any, NamedTuple

import onnx_ir as ir
import torch

from hdexport.graph.branches import lengths_of_branches
from hdexport.graph.layer_deduplication import CopyDuplicateLayers, deduplicated_layers
from hdexport.graph.passes.graph_pass import run_passes
from hdexport.graph.passes.module_names import NameTransposedWeights
from hdexport.graph.passes.optimize import OptimizeTrace
from hdexport.graph.passes.remove_transposes import RemoveTransposes
from hdexport.model.graph_module import GraphModule, argument_name, named_arguments
from hdexport.support.process_settings import only_errors_of
from hdplugins import ONNX_OPSET
from hdruntime.bundle.manifest import InputSpec, Role
from hdruntime.errors import ExportError

logger = logging.getLogger(__name__)

EXPORTER_LOGGER = "torch.onnx._internal.exporter._registration"
"""Logger that warns of packages that encoders do not need, such as torchvision."""

# No other code uses these sizes as a length, batch or block size, so a frozen size is recognized at once.
_TRACED_BATCH, _TRACED_TOKENS, _TRACED_MEMORY = 2, 37, 23

# An axis of size 1 is always frozen.
_MIN_TRACED_TOKENS = 2

_DYNAMIC_AXES = ("batch", "tokens", "memory")

_COUNT = re.compile(r"\bu\d+\b")
"""PyTorch's name of a size that depends on values."""


class Trace(NamedTuple):
    """The graph of a module, and the lengths at which it may be wrong; see `lengths_of_branches`."""

    model: ir.Model
    branches: tuple[int, ...]


def trace(module: GraphModule, *, max_len: int, vocab_size: int) -> Trace:
    """Export a module in evaluation mode.

    The attentions of the graph are nodes of the domain ``hdexport``, without functions. A frozen axis raises an
    ExportError.

    Args:
        module: the module; the graph has its inputs.
        max_len: maximum number of tokens of an input.
        vocab_size: ids of the example input are smaller.
    """
    examples = _examples(module, max_len=max_len, vocab_size=vocab_size)
    try:
        with (
            torch.inference_mode(),
            warnings.catch_warnings(),
            only_errors_of(EXPORTER_LOGGER),
            named_arguments(module),
            deduplicated_layers(module),
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
                optimize=False,  # not before the duplicate layers are copied
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise ExportError(
            f"PyTorch could not export the model: {_root_cause(error)}",
            hint="A family can compute that step with other operators (CONTRIBUTING.md, Add a model family).",
        ) from error
    if program is None:
        raise ExportError("PyTorch's exporter returned no graph.", hint="Try a newer one: pip install -U torch")
    assert program.exported_program is not None
    ids = [spec.role for spec in module.inputs].index(Role.IDS)
    branches = lengths_of_branches(program.exported_program, ids, max_len=max_len)
    if branches:
        logger.info("the model's code compares the number of tokens at %s", ", ".join(map(str, branches)))
    run_passes(
        program.model,
        [CopyDuplicateLayers(), NameTransposedWeights(), OptimizeTrace(), RemoveTransposes(), _ForgetCounts()],
    )
    _name_axes(program.model, module)
    return Trace(program.model, branches)


def _examples(module: GraphModule, *, max_len: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Arguments by name: random ids, masks of ones, and zeros for all other inputs."""
    generator = torch.Generator().manual_seed(0)
    tokens = max(_MIN_TRACED_TOKENS, min(_TRACED_TOKENS, max_len))
    ids = torch.randint(0, vocab_size, (_TRACED_BATCH, tokens), generator=generator)
    values = {
        Role.IDS: ids,
        Role.MASK: torch.ones_like(ids),
        Role.POOLED: torch.ones_like(ids),
        Role.ATTENDED: torch.ones_like(ids),
    }
    return {
        argument_name(spec): torch.zeros(_memory_sizes(spec))
        if spec.role is Role.RECURRENT_STATE
        else values.get(spec.role, torch.zeros_like(ids))
        for spec in module.inputs
    }


def _memory_sizes(spec: InputSpec) -> list[int]:
    sizes = {"batch": _TRACED_BATCH, "memory": min(_TRACED_MEMORY, spec.bound or _TRACED_MEMORY)}
    return [axis if isinstance(axis, int) else sizes[axis] for axis in spec.shape]


def _dynamic_shapes(module: GraphModule) -> dict[str, Any]:
    """The dynamic axes by argument.

    AUTO and not a Dim: with a Dim the exporter must prove bounds, which differ by family. `_name_axes` checks that no
    axis was frozen.
    """
    return {
        argument_name(spec): {
            index: torch.export.Dim.AUTO for index, axis in enumerate(spec.shape) if isinstance(axis, str)
        }
        for spec in module.inputs
    }


def _root_cause(error: BaseException) -> str:
    """The first error; the exporter wraps it in pages of suggestions for the model's code."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


class _ForgetCounts(ir.passes.InPlacePass):
    """Remove names of sizes that depend on values, such as the number of an expert's tokens.

    Such sizes have equal names in a layer and its copies, and ONNX Runtime would give values whose sizes have one name
    one buffer.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in model.graph.all_nodes():
            for value in node.outputs:
                if value.shape is not None and any(_COUNT.search(str(axis)) for axis in value.shape):
                    value.shape = ir.Shape([None if _COUNT.search(str(axis)) else axis for axis in value.shape])
                    modified = True
        return ir.passes.PassResult(model, modified=modified)


def _name_axes(model: ir.Model, module: GraphModule) -> None:
    """Name the dynamic axes of inputs and outputs, and reject frozen axes."""
    specs = {spec.name: spec.shape for spec in module.inputs}
    named = [(value, specs[str(value.name)]) for value in model.graph.inputs]
    for value, axes in (*named, *zip(model.graph.outputs, module.outputs.values(), strict=True)):
        assert value.shape is not None
        dynamic = {index for index, axis in enumerate(axes) if axis in _DYNAMIC_AXES}
        for index in dynamic:
            if isinstance(value.shape[index], int):
                raise ExportError(
                    f"The exporter froze axis {index} of {value.name} to {value.shape[index]}; "
                    "the graph would be correct at that size only.",
                    hint="Please report the model and the versions that `hdexport doctor` prints.",
                )
        value.shape = ir.Shape([axis if index in dynamic else value.shape[index] for index, axis in enumerate(axes)])
