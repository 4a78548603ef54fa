"""OpenVINO in int8: its model quantised by NNCF, with static scales of texts that it is shown."""

from __future__ import annotations

import contextlib
import io
import logging
from pathlib import Path

from hdexport.bench.measure.case import MeasuredModel
from hdexport.bench.peers.inputs import Texts
from hdexport.bench.peers.openvino import (
    MODEL_FILE,
    OpenVino,
    check_cpu,
    converted_model,
    default_type,
)
from hdexport.bench.peers.peer import Prepared, first_cause, not_installed, staged_artefact
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import ExportError
from hdruntime.optional import require

_TEXTS = 64
_LONGEST_TEXT = 512
"""Tokens of the longest text; lengths are spread evenly from an eighth of it."""


class OpenVinoInt8(OpenVino):
    """See `OpenVino`; nodes that are not quantised compute in OpenVINO's default precision."""

    name = "openvino-int8"
    precision = Precision.INT8

    def unavailable(self, manifest: Manifest) -> str | None:
        return super().unavailable(manifest) or not_installed("nncf", install="pip install nncf")

    def prepare(self, subject: MeasuredModel, folder: Path, *, device: str) -> Prepared:
        """Quantise the model, as NNCF's documentation shows for transformers: SmoothQuant and its other defaults."""
        check_cpu(device)
        model = converted_model(subject, folder)
        output = folder / self.name
        with staged_artefact(output, MODEL_FILE) as directory:
            _quantise(model, directory / MODEL_FILE, open_bundle(subject.bundle, check_files=False))
        remark = f"int8 by NNCF, with scales of {_TEXTS} texts; the rest computes in {default_type()}"
        return Prepared(artefact=output / MODEL_FILE, remark=remark)


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
