"""What OpenVINO says of itself, and the instructions of this machine's processor that decide where it is preferred."""

from __future__ import annotations

import platform
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING

from hdruntime.backends.entry import Asked, BackendEntry, Refusal
from hdruntime.backends.findings import Finding, FindingStatus, Probed
from hdruntime.backends.forking import threads_are_lost
from hdruntime.backends.openvino import OPENVINO_LOWERING
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import BackendUnavailableError

if TYPE_CHECKING:
    from hdruntime.backends import Runner
    from hdruntime.bundle.reader import Bundle
    from hdruntime.gpu.driver import Gpu

_PREFERRED_ON = ("x86_64", "amd64")
"""Processors, as Python names them, where ``auto`` takes OpenVINO. The sample model in float32 took 0.83, 0.90, 1.03
and 1.07 of ONNX Runtime's time at 128, 512, 2048 and 4096 tokens, in bfloat16 0.54, 0.54, 0.66 and 0.71 (OpenVINO
2026.4.1, two cores of an AMD EPYC, 2026-11-23)."""

FASTER_WITH = {
    # In float32, blocks took 0.84 and 0.92 of ONNX Runtime's CPU time at 4096 and 8192 tokens on an AMD EPYC, 1.05 and
    # 0.99 on an Intel Xeon, and twice the memory.
    "BlockSparseAttention": ("bfloat16",),
    "ChunkAttention": ("bfloat16",),
    "DenseAttention": ("bfloat16",),
    "SlidingWindowAttention": ("float32", "bfloat16"),
}
"""Operator -> the precisions in which OpenVINO was measured to be faster on a CPU than ONNX Runtime, by more than a
tenth; docs/openvino.md has the numbers of all operators. A precision in which OpenVINO takes more memory for that is
not listed, except windows in float32, which take twice as much for a text."""

_PRECISIONS = {"FP32": "float32", "BF16": "bfloat16", "FP16": "float16", "INT8": "int8"}
"""OpenVINO's words for a device's types -> ours."""


_CPUINFO = Path("/proc/cpuinfo")
"""The file where Linux lists processors' flags; other systems have no such file."""

_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert"})
"""Flags as Linux names them, any of which OpenVINO 2026.4.1 computes in bfloat16 with."""

_INT8 = frozenset({"avx512_vnni", "avx_vnni"})
"""Flags of processors that multiply and add int8 in one instruction."""


class OpenVinoBackend(BackendEntry):
    """OpenVINO, which ``auto`` takes on the CPU where it was measured to be faster."""

    name = Backend.OPENVINO
    library = "OpenVINO"
    rank = 10
    package = "openvino"
    distributions = ("openvino",)
    extra = "openvino"
    lowerings = (OPENVINO_LOWERING,)
    precisions = (Precision.FLOAT32, Precision.BFLOAT16, Precision.INT8)
    devices = "CPU (default), GPU or NPU"

    probe = """
import json
from hdruntime.backends.openvino.backend import is_preferred_here
from hdruntime.backends.openvino.devices import chosen_device, new_core
from hdruntime.optional import require
version, core = require("openvino").__version__, new_core()
found = [chosen_device(core, name) for name in core.available_devices]
devices = [[device.name, device.model, device.capabilities] for device in found]
print(json.dumps({"version": version, "facts": {"devices": devices, "is_preferred": is_preferred_here()}}))
"""
    """Probed without its telemetry, and asked for its devices."""

    def against(self, bundle: Bundle, asked: Asked) -> Refusal | None:
        """Nothing is installed, this process is a fork without its threads, or the bundle has no such graph.

        Of forks that were taken between two batches of OpenVINO 2026.4.1, 2 of 63 and 1 of 939 waited for ever as they
        loaded a bundle: the one, where ``tbb::spawn`` wakes the pool's threads, for a lock of the pool.
        """
        if self.is_installed() and threads_are_lost(self.name):
            return Refusal(
                "this process was forked from one that has run OpenVINO, whose threads a fork does not copy",
                'Use the backend onnxruntime, or do not fork: multiprocessing.get_context("spawn").',
            )
        return super().against(bundle, asked)

    def why_unavailable(self, bundle: Bundle, asked: Asked) -> str | None:
        """The CPU does not compute in bfloat16."""
        if asked.precision is not Precision.BFLOAT16:
            return None
        from hdruntime.backends.openvino.devices import chosen_device, chosen_precision, new_core

        try:
            chosen_precision(chosen_device(new_core(), None), asked.precision, bundle.manifest)
        except BackendUnavailableError as error:
            return str(error)
        return None

    def preference(self, bundle: Bundle, asked: Asked) -> tuple[bool, str]:
        """Where it was measured to be faster, by processor, precision and operators."""
        takes, why = super().preference(bundle, asked)
        against = _why_slower(bundle, asked.precision) if takes else why
        return (True, why) if against is None else (False, against)

    def open(self, bundle: Bundle, asked: Asked) -> Runner:
        """Load the graphs for OpenVINO."""
        from hdruntime.backends.openvino.runner import OpenVinoRunner

        return OpenVinoRunner(bundle, threads=asked.threads, precision=asked.precision, device=asked.device)

    def finding(self, loaded: Probed | None, gpu: Gpu | None) -> Finding:
        """With its devices, and what ``auto`` takes on the CPU."""
        if loaded is None:
            detail = "not installed: on the CPU, auto takes onnxruntime"
            return Finding(self.library, FindingStatus.MISSING, detail, self.install)
        if loaded.error is not None:
            fix = f"pip install --force-reinstall openvino; {self.install}"
            return Finding(self.library, FindingStatus.BROKEN, loaded.error, fix)
        devices = [
            f"{name} ({model}: {', '.join(words for key, words in _PRECISIONS.items() if key in has)})"
            for name, model, has in loaded.facts["devices"]
        ]
        faster = "windows and, outside of float32, for dense attention, blocks and chunks, of bundles with its graph"
        but_for = "" if has_int8() else "; not for int8, without VNNI"
        taken = f"openvino for {faster}{but_for}" if loaded.facts.get("is_preferred") else "onnxruntime"
        detail = f"{loaded.version}: {'; '.join(devices)}; on the CPU, auto takes {taken}"
        return Finding(self.library, FindingStatus.OK, detail)


BACKENDS = (OpenVinoBackend(),)


def is_preferred_here() -> bool:
    """Whether ``auto`` takes OpenVINO on such processors."""
    return platform.machine().lower() in _PREFERRED_ON


def _why_slower(bundle: Bundle, precision: Precision) -> str | None:
    """Why OpenVINO was not measured to be faster than ONNX Runtime; None where it was."""
    if not is_preferred_here():
        return f"OpenVINO was not compared with ONNX Runtime on {platform.machine()}"
    if precision is Precision.INT8 and not has_int8():
        return "OpenVINO was not measured to be faster in int8 on a processor without VNNI"
    faster = {name: FASTER_WITH.get(name, ()) for name in sorted(bundle.manifest.operator_names)}
    others = [name for name, precisions in faster.items() if not precisions]
    if others:
        return f"OpenVINO was not measured to be faster with {', '.join(others)}"
    is_float32 = precision is Precision.FLOAT32 or (
        precision is Precision.AUTO and (bundle.manifest.dtype == Precision.FLOAT32.value or not has_bfloat16())
    )
    if is_float32 and not any(Precision.FLOAT32.value in precisions for precisions in faster.values()):
        return f"OpenVINO was not measured to be faster in float32 with {', '.join(faster) or 'standard operators'}"
    return None


def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16; True where that is not known."""
    return _has_any(_BFLOAT16)


def has_int8() -> bool:
    """Whether the processor adds products of int8 without rounding to 16 bits (VNNI); True where that is not known."""
    return _has_any(_INT8)


def _has_any(wanted: AbstractSet[str]) -> bool:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return True
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), None)
    return flags is None or not wanted.isdisjoint(flags)
