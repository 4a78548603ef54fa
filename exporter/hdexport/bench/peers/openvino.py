"""OpenVINO: PyTorch's model by `openvino.convert_model`, in float32 or as OpenVINO runs it by default."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from hdexport.bench.measure.case import CaseSpec, MeasuredModel
from hdexport.bench.peers.checkpoint_folder import checkpoint_folder
from hdexport.bench.peers.inputs import Texts
from hdexport.bench.peers.peer import Inputs, OpenCase, Peer, Prepared, first_cause, not_installed, staged_artefact
from hdexport.bench.peers.torch_model import load_module
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BackendUnavailableError, ExportError
from hdruntime.optional import require

if TYPE_CHECKING:
    from hdexport.model.graph_module import GraphModule

MODEL_FILE = "model.xml"
"""File in the folder of a model; its weights are beside it."""

_EXAMPLE = (1, 37)
"""Texts and tokens that the model is traced with; none of the axes of its inputs is fixed by that."""

_TYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
"""OpenVINO's short names of types; some of its versions have the long ones."""


class OpenVino(Peer):
    """See `Peer`; the artefact is a file of OpenVINO's format, and products are in float32."""

    name = "openvino"
    example_tokens = _EXAMPLE[1]
    precision: ClassVar[Precision] = Precision.FLOAT32
    """Precision that OpenVINO is asked for; ``auto`` leaves it to OpenVINO."""

    def unavailable(self, manifest: Manifest) -> str | None:
        packages = ("openvino", "torch", "transformers", "safetensors")
        return not_installed(*packages, install="pip install 'hdexport[export,openvino]'")

    def prepare(self, subject: MeasuredModel, folder: Path, *, device: str) -> Prepared:
        """Convert the model, once for all peers of OpenVINO."""
        check_cpu(device)
        return Prepared(artefact=converted_model(subject, folder))

    def open(self, spec: CaseSpec, manifest: Manifest, inputs: Inputs) -> OpenCase:
        """Load the file, with OpenVINO's own settings but the threads and the precision.

        Arrays are given to OpenVINO and returned without copies, as its documentation advises: an answer is valid up
        to the next call.
        """
        settings: dict[str, object] = {"INFERENCE_NUM_THREADS": spec.threads}
        if self.precision is Precision.FLOAT32:
            settings["INFERENCE_PRECISION_HINT"] = "f32"
        compiled = require("openvino").Core().compile_model(spec.artefact, "CPU", settings)
        request = compiled.create_infer_request()
        feeds = {value.any_name: inputs[value.any_name] for value in compiled.inputs}
        outputs = {value.any_name: value for value in compiled.outputs}

        def call() -> dict[str, npt.NDArray[np.float32]]:
            found = request.infer(feeds, share_inputs=True, share_outputs=True)
            return {output.name: found[outputs[output.name]] for output in manifest.answers}

        computes_in = default_type() if self.precision is Precision.AUTO else self.precision.value
        if computes_in == "float16":
            return OpenCase(call, half_precision=True, precision=Precision.AUTO)
        return OpenCase(call, half_precision=False, precision=Precision(computes_in))


class OpenVinoDefault(OpenVino):
    """The same model as OpenVINO runs it where no precision is given."""

    name = "openvino-default"
    precision = Precision.AUTO

    def prepare(self, subject: MeasuredModel, folder: Path, *, device: str) -> Prepared:
        """As `OpenVino`; the remark says which precision that is here."""
        made = super().prepare(subject, folder, device=device)
        return Prepared(artefact=made.artefact, remark=f"computes in {default_type()}, its default on this CPU")


def check_cpu(device: str) -> None:
    """Refuse a GPU: the GPUs that other peers run on are NVIDIA's.

    Raises:
        BackendUnavailableError: with the option that helps.
    """
    if device != "cpu":
        raise BackendUnavailableError("OpenVINO runs on no NVIDIA GPU: hdexport bench --device cpu")


def default_type() -> str:
    """The type that OpenVINO computes in by default: ``float32``, or ``bfloat16`` or, on ARM, ``float16``."""
    name = require("openvino").Core().get_property("CPU", "INFERENCE_PRECISION_HINT").to_string()
    return _TYPES.get(name, name)


def converted_model(subject: MeasuredModel, folder: Path) -> Path:
    """The subject's model in float32, with the bundle's positions, as a file of OpenVINO; made once for a folder.

    Raises:
        ExportError: OpenVINO cannot convert it.
    """
    output = folder / OpenVino.name
    if not output.exists():
        bundle = open_bundle(subject.bundle, check_files=False)
        module = load_module(checkpoint_folder(subject, folder), bundle.manifest, half_precision=False)
        texts, tokens = _EXAMPLE
        example = Texts(bundle).batch(texts, min(tokens, bundle.manifest.max_len))
        with staged_artefact(output, MODEL_FILE) as directory:
            _write_converted(module, directory / MODEL_FILE, example)
    return output / MODEL_FILE


def _write_converted(module: GraphModule, path: Path, example: Inputs) -> None:
    """Write a model with dynamic batch and tokens, its inputs and outputs by the module's names.

    Args:
        module: the model, in evaluation mode.
        path: the file to write; weights go beside it.
        example: the module's inputs, name -> [batch, tokens].

    Raises:
        ExportError: OpenVINO cannot convert it; nothing is written.
    """
    import torch

    from hdexport.model.graph_module import named_arguments

    openvino = require("openvino")
    tensors = {spec.name: torch.from_numpy(example[spec.name]) for spec in module.inputs}
    with torch.inference_mode(), warnings.catch_warnings(), named_arguments(module):
        warnings.simplefilter("ignore")
        try:
            # BigBird's code changes the model at its first short text; tracing would take that for an error.
            module(**tensors)
            model = openvino.convert_model(module, example_input=tensors)
        except Exception as error:
            # Model code that cannot be traced fails with dozens of types of errors.
            raise ExportError(f"openvino.convert_model cannot convert the model: {first_cause(error)}") from error
    for value, name in zip(model.outputs, module.outputs, strict=True):
        value.set_names({name})
    openvino.save_model(model, path, compress_to_fp16=False)
