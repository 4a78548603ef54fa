"""Optional packages, imported where they are used."""

from __future__ import annotations

__all__ = ["INSTALL_ONNXRUNTIME_CUDA", "missing_dependency", "require"]

import importlib
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
    "huggingface_hub": "export",
    "jinja2": "bench",
    "onnx": "export",
    "onnx_ir": "export",
    "onnxscript": "export",
    "polygraphy": "rtx",
    "ray": "ray",
    "safetensors": "export",
    "scipy": "bench",
    "tensorrt": "tensorrt",
    "tensorrt_lean": "lean",
    "tensorrt_rtx": "rtx",
    "torch": "export",
    "transformers": "export",
    "vl_convert": "bench",
}
"""Import name of an optional package -> the extra of hdexport that installs it."""


def require(package: str) -> ModuleType:
    """Import an optional package.

    Args:
        package: import name of a package that an extra of hdexport installs.

    Raises:
        MissingDependencyError: the package is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        raise missing_dependency(error) or error from None


def missing_dependency(error: ModuleNotFoundError) -> MissingDependencyError | None:
    """Our error for a failed import; None if the missing package is not an optional one.

    Args:
        error: from the import of the package, or of a module that needs it.
    """
    extra = _EXTRA_OF_PACKAGE.get((error.name or "").partition(".")[0])
    if extra is None:
        return None
    return MissingDependencyError(
        f"This needs the package {error.name!r}, which is not installed.\n"
        f"Install it with: pip install 'hdexport[{extra}]'"
    )
