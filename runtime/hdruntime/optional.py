"""Optional packages, loaded where they are used."""

from __future__ import annotations

__all__ = ["require"]

import importlib
from types import ModuleType

from hdruntime.errors import MissingDependencyError

_EXTRA_OF_PACKAGE = {
    "onnx": "export",
    "onnx_ir": "export",
    "onnxscript": "export",
    "polygraphy": "rtx",
    "safetensors": "export",
    "tensorrt": "tensorrt",
    "tensorrt_rtx": "rtx",
    "torch": "export",
    "transformers": "export",
}
"""Import name of an optional package -> the extra of hdexport that installs it."""


def require(package: str) -> ModuleType:
    """Import an optional package.

    Args:
        package: import name, one of those that an extra of hdexport installs.

    Raises:
        MissingDependencyError: the package is not installed; the message gives the command that installs it.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        extra = _EXTRA_OF_PACKAGE[package.partition(".")[0]]
        raise MissingDependencyError(
            f"This needs the package {error.name!r}, which is not installed.\n"
            f"Install it with: pip install 'hdexport[{extra}]'"
        ) from None
