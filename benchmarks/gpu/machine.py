"""The step that says what machine this is."""

from __future__ import annotations

__all__ = ["describe", "measure_ceilings"]

import subprocess
from dataclasses import asdict

from benchmarks.gpu.job import Job
from hdexport.bench.measure.calls import environment
from hdexport.bench.measure.ceilings import measured_ceilings

_DTYPES = ("float16", "bfloat16", "tf32", "float32")


def describe(job: Job) -> None:
    """The environment, and what PyTorch and nvidia-smi report."""
    from torch.utils.collect_env import get_pretty_env_info

    job.write(
        case="machine",
        environment=environment(),
        gpu=_gpu_name(job.device),
        torch=get_pretty_env_info().splitlines(),
        nvidia_smi=_nvidia_smi().splitlines(),
    )


def measure_ceilings(job: Job) -> None:
    """The machine's best matrix products and copies."""
    for dtype in ("float32",) if job.rehearsal else _DTYPES:
        job.write(case="ceilings", **asdict(measured_ceilings(job.device, dtype)))


def _gpu_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else ""


def _nvidia_smi() -> str:
    """Clocks, limits, power, memory, ECC, MIG and the processes on the GPU."""
    try:
        done = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stdout + done.stderr).strip()
