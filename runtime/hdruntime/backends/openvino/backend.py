"""The backend OpenVINO, and the processor's instructions that decide whether ``auto`` prefers it."""

from __future__ import annotations

import platform
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING

from hdruntime.backends import Runner
from hdruntime.backends.diagnostics import DiagnosticResult, DiagnosticStatus, ProbeResult
from hdruntime.backends.entry import BackendEntry, LoadOptions, Preference, UnavailableReason
from hdruntime.backends.forking import threads_are_lost
from hdruntime.backends.openvino import OPENVINO_LOWERING
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import BackendUnavailableError

if TYPE_CHECKING:
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
"""Name of a capability in OpenVINO -> name of the precision."""


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
chosen = [chosen_device(core, name) for name in core.available_devices]
devices = [[device.name, device.model, device.capabilities] for device in chosen]
print(json.dumps({"version": version, "details": {"devices": devices, "is_preferred": is_preferred_here()}}))
"""
    """ProbeResult without its telemetry, and asked for its devices."""

    def unavailable_reason(self, bundle: Bundle, options: LoadOptions) -> UnavailableReason | None:
        """OpenVINO is not installed, this process is a fork without OpenVINO's threads, the bundle has no graph for it,
        or the device does not compute in the precision.

        Of forks that were taken between two batches of OpenVINO 2026.4.1, 2 of 63 and 1 of 939 waited for ever as they
        loaded a bundle: the one, where ``tbb::spawn`` wakes the pool's threads, for a lock of the pool.
        """
        if self.is_installed() and threads_are_lost(self.name):
            return UnavailableReason(
                reason="This process was forked from a process that ran OpenVINO, and a fork has no copy of OpenVINO's "
                "threads.",
                hint='Use the backend onnxruntime, or do not fork: multiprocessing.get_context("spawn").',
            )
        unavailable = super().unavailable_reason(bundle, options)
        if unavailable is not None or options.precision not in (Precision.BFLOAT16, Precision.INT8):
            return unavailable
        from hdruntime.backends.openvino.devices import chosen_device, chosen_precision, new_core

        try:
            chosen_precision(chosen_device(new_core(), options.device), options.precision, bundle.manifest)
        except BackendUnavailableError as error:
            return UnavailableReason.from_error(error)
        return None

    def preference(self, bundle: Bundle, options: LoadOptions) -> Preference:
        """Preferred where OpenVINO was measured to be faster, by processor, precision and operators."""
        preference = super().preference(bundle, options)
        slower = _not_faster_reason(bundle, options.precision) if preference.is_preferred else None
        return preference if slower is None else Preference(False, slower)

    def open(self, bundle: Bundle, options: LoadOptions) -> Runner:
        from hdruntime.backends.openvino.runner import OpenVinoRunner

        return OpenVinoRunner(bundle, threads=options.threads, precision=options.precision, device=options.device)

    def diagnose(self, probe: ProbeResult | None, gpu: Gpu | None) -> DiagnosticResult:
        """The diagnosis, with OpenVINO's devices and the choice of ``auto`` on the CPU."""
        if probe is None:
            detail = "not installed; on the CPU, auto takes onnxruntime"
            return DiagnosticResult(self.library, DiagnosticStatus.MISSING, detail, self.install)
        if probe.error is not None:
            fix = f"pip install --force-reinstall openvino; {self.install}"
            return DiagnosticResult(self.library, DiagnosticStatus.BROKEN, probe.error, fix)
        devices = [
            f"{name} ({model}: {', '.join(names for key, names in _PRECISIONS.items() if key in has)})"
            for name, model, has in probe.details["devices"]
        ]
        lower = "bfloat16 and int8" if has_int8() else "bfloat16"
        choice = (
            "openvino for bundles with a graph for OpenVINO and sliding-window attention, or, in "
            f"{lower}, dense, block-sparse or chunk attention"
            if probe.details.get("is_preferred")
            else "onnxruntime"
        )
        detail = f"{probe.version}: {'; '.join(devices)}; on the CPU, auto takes {choice}"
        return DiagnosticResult(self.library, DiagnosticStatus.OK, detail)


BACKENDS = (OpenVinoBackend(),)


def is_preferred_here() -> bool:
    """Whether ``auto`` takes OpenVINO on such processors."""
    return platform.machine().lower() in _PREFERRED_ON


def _not_faster_reason(bundle: Bundle, precision: Precision) -> str | None:
    """Why OpenVINO is not known to be faster than ONNX Runtime, as a sentence, or None."""
    if not is_preferred_here():
        return f"OpenVINO was not compared with ONNX Runtime on {platform.machine()}."
    if precision is Precision.INT8 and not has_int8():
        return "OpenVINO was not measured to be faster in int8 on a processor without VNNI."
    faster = {name: FASTER_WITH.get(name, ()) for name in sorted(bundle.manifest.operator_names)}
    others = [name for name, precisions in faster.items() if not precisions]
    if others:
        return f"OpenVINO was not measured to be faster with {', '.join(others)}."
    is_float32 = precision is Precision.FLOAT32 or (
        precision is Precision.AUTO and (bundle.manifest.dtype == Precision.FLOAT32.value or not has_bfloat16())
    )
    if is_float32 and not any(Precision.FLOAT32.value in precisions for precisions in faster.values()):
        return f"OpenVINO was not measured to be faster in float32 with {', '.join(faster) or 'standard operators'}."
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
