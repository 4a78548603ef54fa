"""The backends there are: those of the folders beside this file, and those that other packages register."""

from __future__ import annotations

import functools
import importlib
import pkgutil

import hdruntime.backends
from hdruntime.backends.entry import BackendEntry, ThisMachine
from hdruntime.backends.precision import Precision
from hdruntime.optional import made_by, registered_backends


@functools.cache
def backends() -> tuple[BackendEntry, ...]:
    """Every backend, those that need a GPU first, each part by rank."""
    ours = (
        entry
        for module in pkgutil.iter_modules(hdruntime.backends.__path__)
        if module.ispkg
        for entry in importlib.import_module(f"hdruntime.backends.{module.name}.backend").BACKENDS
    )
    others = filter(None, (made_by(point, "backend") for point in registered_backends().values()))
    return tuple(sorted((*ours, *others), key=lambda entry: (not entry.needs_gpu, entry.rank)))


def backend_named(name: str) -> BackendEntry | None:
    """The backend of that name; None for no backend's, such as ``auto``."""
    return next((entry for entry in backends() if entry.name == name), None)


def backend_names() -> tuple[str, ...]:
    """The names of all backends, in the order of `Backend`; those of other packages last."""
    from hdruntime.bundle.manifest import Backend

    ours = [backend.value for backend in Backend]
    return (*ours, *(entry.name.value for entry in backends() if entry.name.value not in ours))


def needs_gpu(name: str) -> bool:
    """Whether the backend of that name needs an NVIDIA GPU; False for no backend's."""
    found = backend_named(name)
    return found is not None and found.needs_gpu


def computing_in(precision: Precision) -> list[BackendEntry]:
    """The backends that a CPU computes in a precision by."""
    return [entry for entry in backends() if not entry.needs_gpu and precision in entry.precisions]


def this_machine(device: int = 0) -> ThisMachine:
    """Look at the GPU of that number among CUDA's, and at the driver; with a GPU, ONNX Runtime is imported."""
    from hdruntime.gpu.driver import driver_version, gpus, listed_gpus

    offered = gpus()
    found = offered[device:]
    versions = {entry.name: entry.version(has_gpu=bool(found)) for entry in backends() if entry.needs_gpu}
    return ThisMachine(
        gpu=found[0] if found else None,
        driver=driver_version(),
        versions={name: version for name, version in versions.items() if version is not None},
        listed_gpus=() if offered else listed_gpus(),
    )
