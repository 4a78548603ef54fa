"""The choice among the backends on CPUs, ONNX Runtime and OpenVINO."""

from __future__ import annotations

import logging
import platform
import shlex
from dataclasses import dataclass

from hdplugins import OPERATORS
from hdruntime.backends import Runner
from hdruntime.backends.bundle_graphs import has_graph
from hdruntime.backends.forking import threads_are_lost
from hdruntime.backends.precision import OPTION_OF_GRAPHS, Precision
from hdruntime.backends.processor import has_bfloat16, has_int8
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import OPENVINO_LOWERING
from hdruntime.errors import BackendError, BackendUnavailableError, MissingDependencyError
from hdruntime.optional import is_installed

logger = logging.getLogger(__name__)

_INSTALL_OPENVINO = "pip install 'hdexport[openvino]'"

CPU_BACKENDS = (Backend.ONNXRUNTIME, Backend.OPENVINO)
"""Backends that need no NVIDIA GPU; members compare equal to their names."""

_PREFERS_OPENVINO = ("x86_64", "amd64")
"""Processors, as Python names them, where ``auto`` takes OpenVINO. The sample model in float32 took 0.83, 0.90, 1.03
and 1.07 of ONNX Runtime's time at 128, 512, 2048 and 4096 tokens, in bfloat16 0.54, 0.54, 0.66 and 0.71 (OpenVINO
2026.4.1, two cores of an AMD EPYC, 2026-11-23)."""


@dataclass(frozen=True, kw_only=True)
class CpuOptions:
    """Options that the backends on a CPU are loaded with; as of :func:`hdruntime.load`."""

    threads: int | None
    precision: Precision
    device: str | None


def prefers_openvino_here() -> bool:
    """Whether ``auto`` takes OpenVINO on such processors."""
    return platform.machine().lower() in _PREFERS_OPENVINO


def backend_on_cpu(bundle: Bundle, precision: Precision = Precision.AUTO) -> tuple[Backend, str]:
    """The choice of ``auto`` on the CPU, and why.

    Args:
        bundle: an opened bundle.
        precision: the precision to compute in.
    """
    if precision is Precision.BFLOAT16:
        return Backend.OPENVINO, f"the only one in {precision.value} on a CPU"
    against = _against_openvino(bundle, precision)
    if against is not None:
        return Backend.ONNXRUNTIME, against[0]
    if not prefers_openvino_here():
        return Backend.ONNXRUNTIME, f"OpenVINO was not compared with ONNX Runtime on {platform.machine()}"
    if precision is Precision.INT8 and not has_int8():
        return Backend.ONNXRUNTIME, "OpenVINO was not measured to be faster in int8 on a processor without VNNI"
    faster = {name: _faster_in_openvino(name) for name in sorted(bundle.manifest.operator_names)}
    others = [name for name, precisions in faster.items() if not precisions]
    if others:
        return Backend.ONNXRUNTIME, f"OpenVINO was not measured to be faster with {', '.join(others)}"
    is_float32 = precision is Precision.FLOAT32 or (
        precision is Precision.AUTO and (bundle.manifest.dtype == Precision.FLOAT32.value or not has_bfloat16())
    )
    if is_float32 and not any(Precision.FLOAT32.value in precisions for precisions in faster.values()):
        return Backend.ONNXRUNTIME, f"OpenVINO was not measured to be faster in float32 with {', '.join(faster)}"
    return Backend.OPENVINO, "OpenVINO is installed, and the bundle has its graph"


def _faster_in_openvino(operator: str) -> tuple[str, ...]:
    return OPERATORS[operator].faster_in_openvino if operator in OPERATORS else ()


def why_not_on_cpu(bundle: Bundle, backend: Backend, precision: Precision) -> str | None:
    """Why ``onnxruntime`` or ``openvino`` cannot run a bundle here, and the remedy; None if it can."""
    if backend is Backend.OPENVINO:
        against = _against_openvino(bundle, precision)
        if against is not None:
            return _openvino_refusal(bundle, *against)
    try:
        if backend is Backend.ONNXRUNTIME:
            from hdruntime.backends.onnxruntime import graph_on_cpu

            graph_on_cpu(bundle, precision)
        elif precision is Precision.BFLOAT16:
            from hdruntime.backends.openvino.devices import chosen_device, chosen_precision, new_core

            chosen_precision(chosen_device(new_core(), None), precision, bundle.manifest)
    except BackendUnavailableError as error:
        return str(error)
    return None


def first_on_cpu(bundle: Bundle, cpu: CpuOptions) -> tuple[Runner, str]:
    """The runner of `backend_on_cpu`, or ONNX Runtime's if OpenVINO does not load the graph; and why."""
    backend, why = backend_on_cpu(bundle, cpu.precision)
    try:
        return cpu_runner(bundle, backend, cpu), why
    except BackendError as error:
        if backend is Backend.ONNXRUNTIME or cpu.precision is Precision.BFLOAT16:
            raise
        # All checks passed, so the failure deserves a warning.
        logger.warning("backend auto: %s should run here and does not: %s", backend.value, error)
        return cpu_runner(bundle, Backend.ONNXRUNTIME, cpu), "OpenVINO does not load its graph"


def cpu_runner(bundle: Bundle, backend: Backend, cpu: CpuOptions) -> Runner:
    """The runner of ``onnxruntime`` or ``openvino``.

    Raises:
        BackendError: the backend cannot run here, or cannot run this bundle.
    """
    if backend is Backend.OPENVINO:
        against = _against_openvino(bundle, cpu.precision)
        if against is not None:
            error = BackendUnavailableError if is_installed("openvino") else MissingDependencyError
            raise error(_openvino_refusal(bundle, *against))
        from hdruntime.backends.openvino import OpenVinoRunner

        return OpenVinoRunner(bundle, threads=cpu.threads, precision=cpu.precision, device=cpu.device)
    require_no_device(backend, cpu)
    from hdruntime.backends.onnxruntime import OnnxRuntimeRunner

    return OnnxRuntimeRunner(bundle, threads=cpu.threads, precision=cpu.precision)


def require_no_device(backend: Backend, cpu: CpuOptions) -> None:
    """Refuse a device of OpenVINO's for another backend.

    Raises:
        BackendUnavailableError: a device is given.
    """
    if cpu.device is not None:
        raise BackendUnavailableError(
            f"{backend.value} does not take the device {cpu.device!r}, which is one of OpenVINO's.\n"
            "Leave it out, or use the backend openvino. An NVIDIA GPU is chosen by GpuOptions(device=...)."
        )


def _against_openvino(bundle: Bundle, precision: Precision = Precision.AUTO) -> tuple[str, str] | None:
    """Why OpenVINO cannot run a bundle here, and the remedy; None if nothing speaks against it."""
    if not is_installed("openvino"):
        return "OpenVINO is not installed here", f"Install it with: {_INSTALL_OPENVINO}"
    if threads_are_lost(Backend.OPENVINO):
        return (
            "this process was forked from one that has run OpenVINO, whose threads a fork does not copy",
            'Use the backend onnxruntime, or do not fork: multiprocessing.get_context("spawn").',
        )
    if not has_graph(bundle, OPENVINO_LOWERING):
        command = shlex.join(["hdexport", "rebuild", str(bundle.path), "--target", "openvino"])
        return "the bundle has no graph for OpenVINO", f"Add it: {command}"
    if precision.has_graphs and not has_graph(bundle, OPENVINO_LOWERING, precision=precision):
        reason = f"the bundle has no graph for OpenVINO in {precision.value}"
        return reason, f"Build it again with {OPTION_OF_GRAPHS[precision]}, or leave out the precision."
    return None


def _openvino_refusal(bundle: Bundle, reason: str, advice: str) -> str:
    return f"openvino with {bundle.path} cannot run here: {reason}.\n{advice}"
