"""An ONNX file that others made, in ONNX Runtime, by the names of the manifest."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hdexport.bench.measure.case import CaseSpec
from hdexport.bench.peers.peer import Inputs, OpenCase, Peer, runs_in_half
from hdruntime.bundle.manifest import Manifest
from hdruntime.constants import CUDA_PROVIDER
from hdruntime.errors import BackendUnavailableError, ExportError
from hdruntime.optional import INSTALL_ONNXRUNTIME_CUDA

MODEL_FILE = "model.onnx"
"""File in the folder of an export; weights may be beside it."""

_ERRORS_ONLY = 3
"""ONNX Runtime's log level."""

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": CUDA_PROVIDER}

_OTHER_NAMES = {"last_hidden_state": "token_embeddings"}
"""The tokens' vectors have another name in sentence-transformers than in transformers."""


def check_provider(device: str) -> None:
    """Refuse a GPU that the installed ONNX Runtime does not use: ONNX Runtime would run on the CPU instead.

    Raises:
        BackendUnavailableError: with the command that installs the right one.
    """
    import onnxruntime

    if _PROVIDERS[device] not in onnxruntime.get_available_providers():
        raise BackendUnavailableError(
            f"ONNX Runtime {onnxruntime.__version__} has no {_PROVIDERS[device]}: {INSTALL_ONNXRUNTIME_CUDA}"
        )


class OnnxPeer(Peer):
    """A peer whose artefact is an ONNX file, which ONNX Runtime runs with its own settings but the threads."""

    def open(self, spec: CaseSpec, manifest: Manifest, inputs: Inputs) -> OpenCase:
        """Load the file; the manifest's outputs are requested, and token types default to zeros.

        Raises:
            ExportError: the file has an unknown input, or no output of the manifest.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = spec.threads
        options.log_severity_level = _ERRORS_ONLY
        session = onnxruntime.InferenceSession(spec.artefact, options, providers=[_PROVIDERS[spec.device]])
        feeds = _feeds(session, inputs)
        names = _outputs(session, manifest)

        def call() -> dict[str, npt.NDArray[np.float32]]:
            arrays = session.run(list(names.values()), feeds)
            return {name: array.astype(np.float32, copy=False) for name, array in zip(names, arrays, strict=True)}

        return OpenCase(call, half_precision=runs_in_half(spec.device, manifest))


def _feeds(session: Any, inputs: Inputs) -> dict[str, npt.NDArray[np.int64]]:
    known = {"token_type_ids": np.zeros_like(inputs["input_ids"]), **inputs}
    wanted = [value.name for value in session.get_inputs()]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ExportError(f"The exported graph needs the inputs {', '.join(unknown)}; the model has none of that name.")
    return {name: known[name] for name in wanted}


def _outputs(session: Any, manifest: Manifest) -> dict[str, str]:
    """Name in the manifest -> name in the file."""
    found = [value.name for value in session.get_outputs()]
    names: dict[str, str] = {}
    for output in manifest.answers:
        for name in (output.name, _OTHER_NAMES.get(output.name)):
            if name is not None and name in found:
                names.setdefault(output.name, name)
    if not names:
        raise ExportError(f"The exported graph gives {', '.join(found)}, and none of the bundle's outputs.")
    return names
