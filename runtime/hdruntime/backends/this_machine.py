"""The GPU, the driver and the backends' packages of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hdruntime.backends.registry import backends
from hdruntime.gpu.driver import Gpu, driver_version, gpus, listed_gpus, why_no_gpu


@dataclass(frozen=True, kw_only=True)
class ThisMachine:
    """What decides whether a backend on a GPU runs here; `gpu` is the one that is used.

    Attributes:
        driver: version of the NVIDIA driver, None without one.
        versions: name of a backend on a GPU -> version of its package, where that is installed and reaches the GPU.
        listed_gpus: names of the GPUs that the driver lists where CUDA offers none.
    """

    gpu: Gpu | None
    driver: str | None
    versions: Mapping[str, str]
    listed_gpus: tuple[str, ...] = ()

    @property
    def why_no_gpu(self) -> str:
        """Why there is no `gpu`."""
        return why_no_gpu(self.listed_gpus)


def this_machine(device: int = 0) -> ThisMachine:
    """Look at the GPU of that number among CUDA's, and at the driver; with a GPU, ONNX Runtime is imported."""
    offered = gpus()
    found = offered[device:]
    versions = {entry.name: entry.version(has_gpu=bool(found)) for entry in backends() if entry.needs_gpu}
    return ThisMachine(
        gpu=found[0] if found else None,
        driver=driver_version(),
        versions={name: version for name, version in versions.items() if version is not None},
        listed_gpus=() if offered else listed_gpus(),
    )
