"""A plain export: PyTorch's model by `torch.onnx.export` with dynamic axes and no other options."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hdexport.bench.measure.case import MeasuredModel
from hdexport.bench.peers.checkpoint_folder import checkpoint_folder
from hdexport.bench.peers.inputs import Texts
from hdexport.bench.peers.onnx_session import MODEL_FILE, OnnxPeer, check_provider
from hdexport.bench.peers.peer import Prepared, first_cause, not_installed, runs_in_half, staged_artefact
from hdexport.bench.peers.torch_model import load_module
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import ExportError

if TYPE_CHECKING:
    import torch

    from hdexport.model.graph_module import GraphModule

logger = logging.getLogger(__name__)

_EXAMPLE = (2, 37)
"""Texts and tokens: a short sentence, and no axis of size 1, which the exporter would freeze."""


class OnnxPlain(OnnxPeer):
    """See `Peer`."""

    name = "onnx-plain"
    example_tokens = _EXAMPLE[1]

    def unavailable(self, manifest: Manifest) -> str | None:
        packages = ("torch", "transformers", "safetensors", "onnx", "onnxscript")
        return not_installed(*packages, install="pip install 'hdexport[export]'")

    def prepare(self, subject: MeasuredModel, folder: Path, *, device: str) -> Prepared:
        """Export the model; the remark says so where that took the older exporter."""
        check_provider(device)
        bundle = open_bundle(subject.bundle, check_files=False)
        half_precision = runs_in_half(device, bundle.manifest)
        module = load_module(checkpoint_folder(subject, folder), bundle.manifest, half_precision=half_precision)
        texts, tokens = _EXAMPLE
        example = Texts(bundle).batch(texts, min(tokens, bundle.manifest.max_len))
        output = folder / self.name
        with staged_artefact(output, MODEL_FILE) as directory:
            remark = export_plainly(module, directory / MODEL_FILE, example)
        return Prepared(artefact=output / MODEL_FILE, remark=remark)


def export_plainly(module: GraphModule, path: Path, example: Mapping[str, npt.NDArray[np.int64]]) -> str | None:
    """Export a model with dynamic batch and tokens, as PyTorch's documentation shows.

    If the exporter of torch.export fails, the one of TorchScript is used. It records the code's steps for one short
    text; nothing checks whether the graph is right for others.

    Args:
        module: the model, in evaluation mode.
        path: the file to write; weights may go beside it.
        example: the module's inputs, and maybe others, name -> [batch, tokens], both 2 or more.

    Returns:
        None, or that it took the exporter of TorchScript, and why.

    Raises:
        ExportError: both failed.
    """
    import torch

    from hdexport.graph.tracing import quiet_exporter
    from hdexport.model.graph_module import named_arguments

    tensors = {spec.name: torch.from_numpy(example[spec.name]) for spec in module.inputs}
    with torch.inference_mode(), warnings.catch_warnings(), quiet_exporter(), named_arguments(module):
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
    return f"exported by TorchScript (dynamo=False), since dynamo=True failed: {reason}"


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
