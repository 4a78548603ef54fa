"""The registry of backends: the folders beside this file."""

from __future__ import annotations

import functools
import importlib
import pkgutil

import hdruntime.backends
from hdruntime.backends.entry import BackendEntry, ThisMachine
from hdruntime.backends.precision import Precision


@functools.cache
def backends() -> tuple[BackendEntry, ...]:
    """Every backend, in the order in which ``auto`` tries them: backends that need a GPU first, then by rank."""
    entries = [
        entry
        for module in pkgutil.iter_modules(hdruntime.backends.__path__)
        if module.ispkg
        for entry in importlib.import_module(f"hdruntime.backends.{module.name}.backend").BACKENDS
    ]
    return tuple(sorted(entries, key=lambda entry: (not entry.needs_gpu, entry.rank)))


def backend_named(name: str) -> BackendEntry | None:
    """The backend with this name, or None, as for ``auto``."""
    return next((entry for entry in backends() if entry.name == name), None)


def backend_names() -> tuple[str, ...]:
    """The names of all backends, in the order in which ``auto`` tries them."""
    return tuple(str(entry.name) for entry in backends())


def needs_gpu(name: str) -> bool:
    """Whether the backend with this name needs an NVIDIA GPU; False where no backend has the name."""
    entry = backend_named(name)
    return entry is not None and entry.needs_gpu


def computing_in(precision: Precision) -> list[BackendEntry]:
    """The backends that compute in a precision on a CPU."""
    return [entry for entry in backends() if not entry.needs_gpu and precision in entry.precisions]


def this_machine(device: int = 0) -> ThisMachine:
    """Look up the driver and the GPU with this CUDA device number; with a GPU, ONNX Runtime is imported."""
    from hdruntime.gpu.driver import driver_version, gpus, listed_gpus

    visible = gpus()
    gpu = visible[device] if device < len(visible) else None
    versions = {entry.name: entry.version(has_gpu=gpu is not None) for entry in backends() if entry.needs_gpu}
    return ThisMachine(
        gpu=gpu,
        driver=driver_version(),
        versions={name: version for name, version in versions.items() if version is not None},
        listed_gpus=() if visible else listed_gpus(),
    )
