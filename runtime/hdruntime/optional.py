"""Optional packages, imported where they are used."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hdruntime.errors import MissingDependencyError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = logging.getLogger(__name__)

_TASKS_GROUP = "hdexport.tasks"
"""Group of entry points: name of a task -> its class, a `hdruntime.tasks.task.TextTask`."""

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
    "openvino": "openvino",
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


def entry_points_of(group: str) -> dict[str, EntryPoint]:
    """The entry points that packages register in a group, by name; none of them is imported."""
    from importlib.metadata import entry_points

    return {point.name: point for point in sorted(entry_points(group=group), key=lambda point: point.name)}


@functools.cache
def registered_tasks() -> dict[str, EntryPoint]:
    """Where other packages have the classes of their tasks, by the tasks' names."""
    return entry_points_of(_TASKS_GROUP)


def made_by(point: EntryPoint, what: str) -> Any | None:
    """What the class of another package makes; None, with a warning, if its code fails: others do not need it."""
    try:
        return point.load()()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        logger.warning("The %s %s (%s) cannot be loaded and is ignored: %s", what, point.name, point.value, reason)
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
