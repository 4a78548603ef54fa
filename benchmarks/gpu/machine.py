"""The step that says what machine this is."""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict

from benchmarks.gpu.job import Job
from benchmarks.roofline.ceilings import measured_ceilings
from hdexport.bench.measure.calls import environment

_DTYPES = ("float16", "bfloat16", "tf32", "float32")


def describe(job: Job) -> None:
    """The machine's kind, its clocks and limits, and versions: no report of a tool, which names this machine alone."""
    import torch

    libraries = {each.name: each.version for each in importlib.metadata.distributions() if _is_of_nvidia(each.name)}
    job.write(
        case="machine",
        environment=environment(),
        gpu=_gpu_name(job.device),
        cuda=torch.version.cuda,
        libraries=dict(sorted(libraries.items())),
    )


def measure_ceilings(job: Job) -> None:
    """The machine's best matrix products and copies."""
    for dtype in ("float32",) if job.rehearsal else _DTYPES:
        job.write(case="ceilings", **asdict(measured_ceilings(job.device, dtype)))


def _gpu_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else ""


def _is_of_nvidia(package: str) -> bool:
    return package.startswith("nvidia-")
