"""PyTorch's model by `openvino.convert_model`: in float32, in OpenVINO's default precision, and in int8 by NNCF."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hdexport.bench.baselines.baseline import (
    Baseline,
    CaseSpec,
    Inputs,
    MeasuredModel,
    OpenCase,
    Prepared,
    Texts,
    first_cause,
    not_installed,
    staged_artefact,
)
from hdexport.bench.baselines.torch_model import module_and_example
from hdruntime.arrays import FloatArray
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import BackendUnavailableError, ExportError
from hdruntime.optional import require

if TYPE_CHECKING:
    from hdexport.model.graph_module import GraphModule

MODEL_FILE = "model.xml"
"""File in the folder of a model; its weights are beside it."""

_EXAMPLE = (1, 37)
"""Texts and tokens that the model is traced with; they fix no axis."""

_TYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
"""OpenVINO's short names of types; some of its versions have the long ones."""

_TEXTS = 64

_LONGEST_TEXT = 512
"""Tokens of the longest of the texts that NNCF is shown; lengths spread evenly from an eighth of it."""


class OpenVino(Baseline):
    """A baseline whose artefact is a file of OpenVINO's format, and whose products are in float32."""

    name = "openvino"
    example_tokens = _EXAMPLE[1]
    precision: ClassVar[Precision] = Precision.FLOAT32
    """Precision that OpenVINO is asked for; ``auto`` leaves it to OpenVINO."""

    def unavailable(self, manifest: Manifest) -> str | None:
        packages = ("openvino", "torch", "transformers", "safetensors")
        return not_installed(*packages, install="pip install 'hdexport[export,openvino]'")

    def prepare(self, subject: MeasuredModel, folder: Path, *, device: str) -> Prepared:
        """Converts the model, once for all baselines of OpenVINO."""
        _check_cpu(device)
        return Prepared(artefact=_converted_model(subject, folder))

    def open(self, spec: CaseSpec, manifest: Manifest, inputs: Inputs) -> OpenCase:
        """Loads the file, with OpenVINO's own settings but for the threads and the precision. Arrays are neither copied
        in nor out, as OpenVINO advises: an answer is valid up to the next call."""
        settings: dict[str, object] = {"INFERENCE_NUM_THREADS": spec.threads}
        if self.precision is Precision.FLOAT32:
            settings["INFERENCE_PRECISION_HINT"] = "f32"
        compiled = require("openvino").Core().compile_model(spec.artefact, "CPU", settings)
        request = compiled.create_infer_request()
        feeds = {value.any_name: inputs[value.any_name] for value in compiled.inputs}
        outputs = {value.any_name: value for value in compiled.outputs}

        def call() -> dict[str, FloatArray]:
            # Not `infer`, which loses errors with one thread (OpenVINO 2026.4.1).
            request.start_async(feeds, share_inputs=True)
            request.wait()
            return {output.name: request.get_tensor(outputs[output.name]).data for output in manifest.result_outputs}

        computes_in = default_type() if self.precision is Precision.AUTO else self.precision.value
        if computes_in == "float16":
            return OpenCase(call, half_precision=True, precision=Precision.AUTO)
        return OpenCase(call, half_precision=False, precision=Precision(computes_in))


class OpenVinoDefault(OpenVino):
    """The same model in the precision that OpenVINO chooses where none is given."""

    name = "openvino-default"
    precision = Precision.AUTO

    def prepare(self, subject: MeasuredModel, folder: Path, *, device: str) -> Prepared:
        """As `OpenVino`; the remark names that precision."""
        made = super().prepare(subject, folder, device=device)
        return Prepared(artefact=made.artefact, remark=f"computes in {default_type()}, its default on this CPU")


class OpenVinoInt8(OpenVino):
    """The model quantised by NNCF with static scales; nodes that are not quantised compute in OpenVINO's default
    precision."""

    name = "openvino-int8"
    precision = Precision.INT8

    def unavailable(self, manifest: Manifest) -> str | None:
        return super().unavailable(manifest) or not_installed("nncf", install="pip install nncf")

    def prepare(self, subject: MeasuredModel, folder: Path, *, device: str) -> Prepared:
        """Quantises the model as NNCF's documentation shows for transformers: with SmoothQuant and other defaults."""
        _check_cpu(device)
        model = _converted_model(subject, folder)
        output = folder / self.name
        with staged_artefact(output, MODEL_FILE) as directory:
            _quantise(model, directory / MODEL_FILE, open_bundle(subject.bundle, check_files=False))
        remark = f"int8 by NNCF, with scales of {_TEXTS} texts; the rest computes in {default_type()}"
        return Prepared(artefact=output / MODEL_FILE, remark=remark)


def default_type() -> str:
    """The type that OpenVINO computes in by default: ``float32``, or ``bfloat16`` or, on ARM, ``float16``."""
    name = require("openvino").Core().get_property("CPU", "INFERENCE_PRECISION_HINT").to_string()
    return _TYPES.get(name, name)


def _check_cpu(device: str) -> None:
    """Refuses a GPU: other baselines' GPUs are NVIDIA's."""
    if device != "cpu":
        raise BackendUnavailableError("OpenVINO runs on no NVIDIA GPU: hdexport bench --device cpu")


def _converted_model(subject: MeasuredModel, folder: Path) -> Path:
    """The model in float32, with the bundle's positions, as a file of OpenVINO; made once per folder."""
    output = folder / OpenVino.name
    if not output.exists():
        batch, tokens = _EXAMPLE
        module, example = module_and_example(subject, folder, device="cpu", batch=batch, tokens=tokens)
        with staged_artefact(output, MODEL_FILE) as directory:
            _write_converted(module, directory / MODEL_FILE, example)
    return output / MODEL_FILE


def _write_converted(module: GraphModule, path: Path, example: Inputs) -> None:
    """Writes a model with dynamic batch and tokens, its inputs and outputs named as the module's; `example` has the
    inputs, name -> [batch, tokens]."""
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
    for value in model.inputs:
        # A value of the trace that is the same may have left its number there.
        value.set_names(value.get_names() & set(tensors))
    for value, name in zip(model.outputs, module.outputs, strict=True):
        value.set_names({name})
    openvino.save_model(model, path, compress_to_fp16=False)


def _quantise(source: Path, path: Path, bundle: Bundle) -> None:
    openvino, nncf = require("openvino"), require("nncf")
    nncf.set_log_level(logging.ERROR)
    model = openvino.Core().read_model(source)
    names = [value.any_name for value in model.inputs]
    longest = min(_LONGEST_TEXT, bundle.manifest.max_len)
    lengths = [max(1, longest * (number % 8 + 1) // 8) for number in range(_TEXTS)]
    shown = [{name: rows[name] for name in names} for rows in Texts(bundle).alone(lengths)]
    # NNCF draws its progress on stdout.
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            quantised = nncf.quantize(
                model, nncf.Dataset(shown), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(shown)
            )
        except Exception as error:
            # A graph that NNCF cannot quantise fails with dozens of types of errors.
            raise ExportError(f"nncf.quantize cannot quantise the model: {first_cause(error)}") from error
    openvino.save_model(quantised, path, compress_to_fp16=False)
