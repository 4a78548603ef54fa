"""Optional packages, imported where they are used."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from hdruntime.errors import MissingDependencyError

INSTALL_ONNXRUNTIME_CUDA = (
    "pip install 'hdexport[gpu]' && pip uninstall -y onnxruntime && "
    "pip install --force-reinstall --no-deps onnxruntime-gpu"
)
"""Installs the extra ``gpu`` for use: onnxruntime and onnxruntime-gpu share files, so the last one installed stays."""

_EXTRA_OF_PACKAGE = {
    "altair": "bench",
    "cuda": "tensorrt",
    "h5py": "keras",
    "huggingface_hub": "hub",
    "jinja2": "bench",
    "onnx": "export",
    "onnx_ir": "export",
    "onnxscript": "export",
    "onnxruntime_extensions": "targets",
    "openvino": "openvino",
    "openvino_tokenizers": "targets",
    "polygraphy": "rtx",
    "prometheus_client": "serve",
    "ray": "ray",
    "safetensors": "export",
    "sentence_transformers": "export",
    "starlette": "serve",
    "tensorrt": "tensorrt",
    "tensorrt_lean": "lean",
    "tensorrt_rtx": "rtx",
    "torch": "export",
    "transformers": "export",
    "uvicorn": "serve",
    "vl_convert": "bench",
}
"""Import name of an optional package -> the extra of hdexport that installs it."""

_TELEMETRY_OF_PACKAGE = {"nncf": "openvino_telemetry", "openvino": "openvino_telemetry"}
"""Import name of an optional package -> the package that tells its makers how it is used, as soon as it is imported.
Where the second is missing, the first works without it; no setting switches it off for a single process."""


def require(package: str) -> ModuleType:
    """Import an optional package, or one that needs such a package, by its import name; its telemetry is switched off
    unless the process has imported that already. The error of a missing one has the command that installs it."""
    telemetry = _TELEMETRY_OF_PACKAGE.get(package.partition(".")[0])
    if telemetry is not None:
        # None makes its import fail, as if it were not installed.
        sys.modules.setdefault(telemetry, None)  # type: ignore[arg-type]
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        raise missing_dependency(error) or error from None


def is_installed(package: str) -> bool:
    """Whether an optional package can be imported, by its import name; it is not imported."""
    return importlib.util.find_spec(package) is not None


def installed_version(distribution: str) -> str | None:
    """The version of a distribution, whether or not its package loads; None where it is not installed."""
    # Imported here, as below: it takes 20 ms, and not every command asks.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def missing_dependency(error: ModuleNotFoundError) -> MissingDependencyError | None:
    """Our error for a failed import of a package, or of a module that needs it; None if the package is not optional."""
    extra = _EXTRA_OF_PACKAGE.get((error.name or "").partition(".")[0])
    if extra is None:
        return None
    return MissingDependencyError(
        f"This needs the package {error.name!r}, which is not installed.",
        hint=f"Install it with: pip install 'hdexport[{extra}]'",
    )
