"""A plain `torch.onnx.export` of PyTorch's model with dynamic axes, in ONNX Runtime."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hdexport.bench.baselines.baseline import (
    Baseline,
    CaseSpec,
    Inputs,
    MeasuredModel,
    OpenCase,
    Prepared,
    first_cause,
    not_installed,
    runs_in_half,
    staged_artefact,
)
from hdexport.bench.baselines.torch_model import module_and_example
from hdexport.support.process_settings import only_errors_of
from hdruntime.arrays import FloatArray, IntArray
from hdruntime.backends.onnxruntime import CUDA_PROVIDER
from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import BackendUnavailableError, ExportError
from hdruntime.optional import INSTALL_ONNXRUNTIME_CUDA

if TYPE_CHECKING:
    import torch

    from hdexport.model.graph_module import GraphModule

logger = logging.getLogger(__name__)

_EXAMPLE = (2, 37)
"""Batch and tokens of the export's example: no axis has size 1, which the exporter would fix."""

MODEL_FILE = "model.onnx"
"""File in the directory of an export; weights may be beside it."""

_ERRORS_ONLY = 3
"""ONNX Runtime's log level."""

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": CUDA_PROVIDER}

_OTHER_NAMES = {"last_hidden_state": "token_embeddings"}
"""Output of transformers -> its name in sentence-transformers."""


class OnnxBaseline(Baseline):
    """A baseline whose artefact is an ONNX file, run by ONNX Runtime with default settings except for the threads."""

    def open(self, spec: CaseSpec, manifest: Manifest, inputs: Inputs) -> OpenCase:
        """Load the file; token types default to zeros."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = spec.threads
        options.log_severity_level = _ERRORS_ONLY
        session = onnxruntime.InferenceSession(spec.artefact, options, providers=[_PROVIDERS[spec.device]])
        feeds = _feeds(session, inputs)
        names = _outputs(session, manifest)

        def call() -> dict[str, FloatArray]:
            arrays = session.run(list(names.values()), feeds)
            return {name: array.astype(np.float32, copy=False) for name, array in zip(names, arrays, strict=True)}

        return OpenCase(call, half_precision=runs_in_half(spec.device, manifest))


class OnnxPlain(OnnxBaseline):
    name = "onnx-plain"
    example_tokens = _EXAMPLE[1]

    def unavailable(self, manifest: Manifest) -> str | None:
        packages = ("torch", "transformers", "safetensors", "onnx", "onnxscript")
        return not_installed(*packages, install="pip install 'hdexport[export]'")

    def prepare(self, model: MeasuredModel, folder: Path, *, device: str) -> Prepared:
        """Export the model; the remark says whether PyTorch's older exporter was used."""
        check_provider(device)
        batch, tokens = _EXAMPLE
        module, example = module_and_example(model, folder, device=device, batch=batch, tokens=tokens)
        output = folder / self.name
        with staged_artefact(output, MODEL_FILE) as directory:
            remark = export_plainly(module, directory / MODEL_FILE, example)
        return Prepared(artefact=output / MODEL_FILE, remark=remark)


def export_plainly(module: GraphModule, path: Path, example: Mapping[str, IntArray]) -> str | None:
    """Export a model with dynamic batch and tokens, as PyTorch's documentation shows.

    If ``dynamo=True`` fails, TorchScript traces one short sequence, unchecked for other lengths; the returned text
    says so and why.

    `example` has the module's inputs, name -> [batch, tokens], both axes at least 2. Weights may be written beside
    `path`.
    """
    import torch

    from hdexport.graph.tracing import EXPORTER_LOGGER
    from hdexport.model.graph_module import named_arguments

    tensors = {spec.name: torch.from_numpy(example[spec.name]) for spec in module.inputs}
    with torch.inference_mode(), warnings.catch_warnings(), only_errors_of(EXPORTER_LOGGER), named_arguments(module):
        warnings.simplefilter("ignore")
        try:
            _export_program(module, path, tensors)
        except Exception as error:
            # Model code that cannot be exported fails with dozens of types of errors, not all the exporter's own.
            reason = first_cause(error)
        else:
            return None
        logger.info("torch.onnx.export(dynamo=True) failed: %s", reason)
        try:
            _export_script(module, path, {name: tensor[:1] for name, tensor in tensors.items()})
        except Exception as error:
            raise ExportError(
                f"torch.onnx.export cannot export the model: {reason}; with dynamo=False: {first_cause(error)}"
            ) from error
    return f"exported by TorchScript (dynamo=False), because dynamo=True failed: {reason}"


def check_provider(device: str) -> None:
    """Raise for a GPU that the installed ONNX Runtime cannot use: it would run on the CPU without an error."""
    import onnxruntime

    if _PROVIDERS[device] not in onnxruntime.get_available_providers():
        raise BackendUnavailableError(
            f"ONNX Runtime {onnxruntime.__version__} has no {_PROVIDERS[device]}: {INSTALL_ONNXRUNTIME_CUDA}"
        )


def _export_program(module: GraphModule, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    import torch

    axes = {spec.name: _dynamic(spec.shape) for spec in module.inputs}
    options: dict[str, Any] = {"dynamo": True, "dynamic_shapes": axes}
    program = torch.onnx.export(module, kwargs=dict(tensors), **_names(module, tensors), **options)
    assert program is not None
    program.save(path, external_data=True)


def _export_script(module: GraphModule, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    import torch

    axes = {spec.name: _dynamic(spec.shape) for spec in module.inputs}
    axes |= {name: _dynamic(shape) for name, shape in module.outputs.items()}
    options: dict[str, Any] = {"dynamo": False, "dynamic_axes": axes}
    torch.onnx.export(module, args=(), f=path, kwargs=dict(tensors), **_names(module, tensors), **options)


def _names(module: GraphModule, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {"input_names": list(tensors), "output_names": list(module.outputs), "verbose": False}


def _dynamic(axes: Sequence[str | int]) -> dict[int, str]:
    return {index: str(axis) for index, axis in enumerate(axes) if axis in ("batch", "tokens")}


def _feeds(session: Any, inputs: Inputs) -> dict[str, IntArray]:
    available = {"token_type_ids": np.zeros_like(inputs["input_ids"]), **inputs}
    wanted = [value.name for value in session.get_inputs()]
    unknown = [name for name in wanted if name not in available]
    if unknown:
        raise ExportError(f"The exported graph needs the inputs {', '.join(unknown)}; the model has no such inputs.")
    return {name: available[name] for name in wanted}


def _outputs(session: Any, manifest: Manifest) -> dict[str, str]:
    """Name in the manifest -> name in the file."""
    outputs = [value.name for value in session.get_outputs()]
    names: dict[str, str] = {}
    for output in manifest.result_outputs:
        for name in (output.name, _OTHER_NAMES.get(output.name)):
            if name is not None and name in outputs:
                names.setdefault(output.name, name)
    if not names:
        raise ExportError(f"The exported graph has the outputs {', '.join(outputs)} and none of the bundle's outputs.")
    return names
