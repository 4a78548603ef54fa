"""The choice of the backend for a bundle: the requested one, or the first that can run; rebuilds engines on request."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

from hdruntime.backends import Runner
from hdruntime.backends.cpu_choice import (
    CPU_BACKENDS,
    CpuOptions,
    cpu_runner,
    first_on_cpu,
    require_no_device,
    why_not_on_cpu,
)
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend, EngineFile
from hdruntime.bundle.passport import (
    ThisMachine,
    builds_for,
    differences,
    older_driver,
    read_passport,
    this_machine,
    version_numbers,
)
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.constants import TENSORRT_RTX_ON_REQUEST
from hdruntime.errors import BackendError, BackendUnavailableError, InputError
from hdruntime.gpu.options import GpuOptions
from hdruntime.optional import INSTALL_ONNXRUNTIME_CUDA

logger = logging.getLogger(__name__)

_AUTO = "auto"
_ASKED = "asked for"

_CPU = "cpu"
_CUDA = re.compile(r"cuda(?::(\d+))?")
"""Names of devices as PyTorch has them."""

_FLAVOUR = {
    Backend.TENSORRT: Backend.TENSORRT,
    Backend.TENSORRT_RTX: Backend.TENSORRT_RTX,
    # TensorRT builds the lean runtime's engines.
    Backend.TENSORRT_LEAN: Backend.TENSORRT,
}
"""Backend for engines -> flavour of these engines, in the order that ``auto`` tries."""

GPU_BACKENDS = (*_FLAVOUR, Backend.ONNXRUNTIME_CUDA)
"""Backends that need an NVIDIA GPU; members compare equal to their names."""

_INSTALL = {
    Backend.ONNXRUNTIME_CUDA: INSTALL_ONNXRUNTIME_CUDA,
    Backend.TENSORRT: "pip install 'hdexport[tensorrt]'",
    Backend.TENSORRT_RTX: "pip install 'hdexport[rtx]'",
    Backend.TENSORRT_LEAN: "pip install 'hdexport[lean]'",
}

_REBUILD = """
import sys
from importlib.metadata import entry_points
(command,) = entry_points(group="console_scripts", name="hdexport")
sys.exit(command.load()(sys.argv[1:]))
"""
"""Starts the ``hdexport`` command that is installed for this Python: the runtime imports no code for building, and a
separate process frees a build's memory when it ends."""

_ERROR_LINES = 20
"""Last lines of a failed rebuild's output that are shown; the reason is at the end."""


def open_runner(
    bundle: Bundle,
    backend: Backend | str,
    *,
    threads: int | None,
    precision: Precision = Precision.AUTO,
    device: str | None = None,
    rebuild: bool = False,
    gpu: GpuOptions | None = None,
    machine: ThisMachine | None = None,
) -> tuple[Bundle, Runner, str]:
    """Load a bundle's graph or engine with a backend.

    Args:
        bundle: an opened bundle.
        backend: one of :class:`Backend`, which runs or raises, or ``auto``: the first that can run here,
            TensorRT engines first, then ONNX Runtime on the GPU, then `backend_on_cpu`. The choice and its reason are
            logged, as a warning if a GPU stays unused.
        threads: CPU threads of one run; None for `hdruntime.process_limits.chosen_threads`.
        precision: the precision that a CPU computes in; backends on a GPU refuse all but ``auto``.
        device: ``cpu``, ``cuda`` or ``cuda:N`` leave only the backends there; else OpenVINO's name of a device.
        rebuild: build an engine if the bundle has none that runs on this machine's GPU.
        gpu: options of backends on a GPU, by default ``GpuOptions()``.
        machine: the machine to run on, by default this one.

    Returns:
        the bundle, opened again if it was rebuilt, its runner, and the reason for the choice.

    Raises:
        InputError: the backend is unknown.
        BackendUnavailableError: the requested backend cannot run here, or cannot run this bundle.
        BackendError: the backend could not load the bundle, or a rebuild failed.
    """
    chosen = None if backend == _AUTO else _backend_of_name(backend)
    gpu = gpu or GpuOptions()
    needs_gpu = _CUDA.fullmatch(device or "")
    if needs_gpu:
        _require_place(chosen, GPU_BACKENDS, device)
        gpu = dataclasses.replace(gpu, device=int(needs_gpu[1] or gpu.device))
    is_on_cpu = device == _CPU
    if is_on_cpu:
        _require_place(chosen, CPU_BACKENDS, device)
    cpu = CpuOptions(threads=threads, precision=precision, device=None if needs_gpu or is_on_cpu else device)
    if chosen is None and is_on_cpu:
        runner, why = first_on_cpu(bundle, cpu)
        return bundle, runner, f"device {device}; {why}"
    if chosen is None and cpu.device is not None:
        return bundle, cpu_runner(bundle, Backend.OPENVINO, cpu), f"the only one with device {device}"
    if chosen in CPU_BACKENDS:
        return bundle, cpu_runner(bundle, chosen, cpu), _ASKED
    machine = machine or this_machine(gpu.device)
    if rebuild and machine.gpu is not None and chosen is not Backend.ONNXRUNTIME_CUDA:
        bundle = _rebuilt_where_needed(bundle, list(_FLAVOUR) if chosen is None else [chosen], machine)
    if chosen is not None:
        _require_no_options_of_cpus(chosen, cpu)
        return bundle, _gpu_runner(bundle, chosen, machine, gpu, threads), _ASKED
    runner, reason = _first_that_runs(bundle, machine, gpu, cpu, needs_gpu=needs_gpu is not None)
    return bundle, runner, reason


def why_unavailable(
    bundle: Bundle,
    backend: Backend,
    *,
    precision: Precision = Precision.AUTO,
    machine: ThisMachine | None = None,
) -> str | None:
    """Why a backend cannot run a bundle, and the remedy; None if it can.

    Args:
        bundle: an opened bundle.
        backend: requested by name.
        precision: the precision that a backend on a CPU is to compute in.
        machine: the machine to run on, by default this one.
    """
    if backend in CPU_BACKENDS:
        return why_not_on_cpu(bundle, backend, precision)
    machine = machine or this_machine()
    reasons = _reasons_against(bundle, backend, machine)
    if not reasons:
        return None
    engine = None if backend is Backend.ONNXRUNTIME_CUDA else _best_engine(bundle, backend, machine)[0]
    what = f"The engine {engine.file} of {bundle.path}" if engine else f"{backend.value} with {bundle.path}"
    return f"{what} cannot run here: {'; '.join(reasons)}.\n{_advice(bundle, backend, machine)}"


def _require_place(chosen: Backend | None, fitting: Sequence[Backend], device: str | None) -> None:
    if chosen is not None and chosen not in fitting:
        raise BackendUnavailableError(
            f"The backend {chosen.value} does not run on the device {device}; {', '.join(fitting)} do.\n"
            "Leave out the device, or the backend."
        )


def _first_that_runs(
    bundle: Bundle, machine: ThisMachine, gpu: GpuOptions, cpu: CpuOptions, *, needs_gpu: bool
) -> tuple[Runner, str]:
    if cpu.precision is not Precision.AUTO:
        runner, why = first_on_cpu(bundle, cpu)
        reason = f"{cpu.precision.value} is a precision of CPUs; {why}"
        logger.info("backend auto: chose %s: %s", runner.backend.value, reason)
        return runner, reason
    for backend in _gpu_backends(bundle):
        refusal = _reasons_against(bundle, backend, machine)
        if refusal:
            logger.info("backend auto: not %s: %s", backend.value, "; ".join(refusal))
            continue
        try:
            runner = _gpu_runner(bundle, backend, machine, gpu, cpu.threads)
        except BackendError as error:
            # All checks passed, so the failure deserves a warning.
            logger.warning("backend auto: %s should run here and does not: %s", backend.value, error)
            continue
        assert machine.gpu is not None
        reason = f"the first that runs on {machine.gpu.name}"
        logger.info("backend auto: chose %s, %s", backend.value, reason)
        return runner, reason
    reason = machine.why_no_gpu if machine.gpu is None else f"no backend that is installed uses {machine.gpu.name}"
    if needs_gpu:
        ways = _ways(bundle, machine, have_failed=True) if machine.gpu else ["Leave out the device to run on the CPU."]
        raise BackendUnavailableError("\n".join([f"{bundle.path} cannot run on the device cuda: {reason}.", *ways]))
    runner, why = first_on_cpu(bundle, cpu)
    name = runner.backend.value
    if machine.gpu is not None:
        logger.warning("%s", _unused_gpu(bundle, machine, name))
    elif machine.listed_gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:
        logger.warning("backend auto: chose %s, on the CPU: %s; %s.\nSee: hdexport doctor", name, reason, why)
    else:
        logger.info("backend auto: chose %s: %s; %s", name, reason, why)
    return runner, f"{reason}; {why}"


def _gpu_backends(bundle: Bundle) -> list[Backend]:
    """Backends on a GPU that ``auto`` tries, in this order."""
    return [*(backend for backend in _FLAVOUR if _engines(bundle, backend)), Backend.ONNXRUNTIME_CUDA]


def _unused_gpu(bundle: Bundle, machine: ThisMachine, chosen: str) -> str:
    """The warning for an unused GPU: the missing packages, and the command to type."""
    assert machine.gpu is not None
    refusals = {backend: _reasons_against(bundle, backend, machine) for backend in _gpu_backends(bundle)}
    return "\n".join([
        f"backend auto: chose {chosen}, on the CPU, although there is a GPU ({machine.gpu.name}).",
        *(f"{name.value} cannot run here: {'; '.join(reasons)}." for name, reasons in refusals.items() if reasons),
        *_ways(bundle, machine, have_failed=True),
    ])  # fmt: skip


def _require_no_options_of_cpus(backend: Backend, cpu: CpuOptions) -> None:
    require_no_device(backend, cpu)
    if cpu.precision is not Precision.AUTO:
        raise BackendUnavailableError(
            f"{backend.value} does not take the precision {cpu.precision.value}: on a GPU a bundle computes in the "
            "precision that it was built in, by --fp16 or --bf16.\n"
            "Leave it out, or use the backend openvino or onnxruntime."
        )


def _gpu_runner(bundle: Bundle, backend: Backend, machine: ThisMachine, gpu: GpuOptions, threads: int | None) -> Runner:
    refusal = why_unavailable(bundle, backend, machine=machine)
    if refusal is not None:
        raise BackendUnavailableError(refusal)
    if backend is Backend.ONNXRUNTIME_CUDA:
        from hdruntime.backends.onnxruntime_cuda import OnnxRuntimeCudaRunner

        return OnnxRuntimeCudaRunner(bundle, gpu=gpu, threads=threads)
    return _engine_runner(bundle, backend, machine, gpu)


def _engine_runner(bundle: Bundle, backend: Backend, machine: ThisMachine, gpu: GpuOptions) -> Runner:
    if gpu.memory_limit_bytes is not None:
        raise BackendUnavailableError(
            f"{backend.value} holds no memory_limit_bytes ({gpu.memory_limit_bytes}): an engine's memory was planned "
            "when it was built.\nLeave it out, or use the backend onnxruntime_cuda."
        )
    engine, _ = _best_engine(bundle, backend, machine)
    assert engine is not None
    remark = older_driver(read_passport(bundle, engine), machine)
    if remark is not None:
        logger.warning("%s: %s", engine.file, remark)
    from hdruntime.backends.tensorrt import TensorRtRunner

    return TensorRtRunner(bundle, engine, backend=backend, gpu=gpu)


def _reasons_against(bundle: Bundle, backend: Backend, machine: ThisMachine) -> tuple[str, ...]:
    """Why a backend on a GPU cannot run a bundle; empty if it can."""
    if backend is not Backend.ONNXRUNTIME_CUDA:
        return _best_engine(bundle, backend, machine)[1]
    if machine.gpu is None:
        return (machine.why_no_gpu,)
    has_cuda = backend in machine.versions
    return () if has_cuda else ("no ONNX Runtime that was built with CUDA is installed here",)


def _engines(bundle: Bundle, backend: Backend) -> list[EngineFile]:
    return [engine for engine in bundle.manifest.engines if engine.flavour == _FLAVOUR[backend].value]


def _best_engine(bundle: Bundle, backend: Backend, machine: ThisMachine) -> tuple[EngineFile | None, tuple[str, ...]]:
    """The engine with the fewest reasons against it, and these reasons."""
    engines = _engines(bundle, backend)
    if not engines:
        return None, (f"the bundle has no {_FLAVOUR[backend].value} engine",)
    reasons = {engine: differences(engine, backend, machine) for engine in engines}
    best = min(engines, key=lambda engine: len(reasons[engine]))
    return best, reasons[best]


def _advice(bundle: Bundle, backend: Backend, machine: ThisMachine) -> str:
    if machine.gpu is None or machine.driver is None:
        return "Use the backend onnxruntime (or auto), which needs no GPU. See: hdexport doctor"
    steps = _steps(bundle, backend, machine)
    if steps is None:
        return "\n".join([f"{backend.value} supports no GPU of {machine.gpu.architecture}.", *_ways(bundle, machine)])
    if steps[0].startswith("hdexport"):
        return (
            f"Rebuild the engine on this machine: {steps[0]}\n"
            "or load the bundle with rebuild=True, in a job hdexport run --rebuild."
        )
    return f"Install it with: {' && '.join(steps)}"


def _ways(bundle: Bundle, machine: ThisMachine, *, have_failed: bool = False) -> list[str]:
    """Lines that say how to use this GPU: by an engine, of the bundle's own flavour if possible, and by ONNX Runtime.

    Args:
        bundle: an opened bundle.
        machine: has a GPU.
        have_failed: the backends that nothing speaks against have failed.
    """
    backends = [backend for backend in _gpu_backends(bundle) if backend is not Backend.TENSORRT_LEAN]
    if all(_steps(bundle, backend, machine) is None for backend in backends[:-1]):
        backends.insert(0, Backend.TENSORRT)
    steps = {backend: _steps(bundle, backend, machine) for backend in backends}
    return ["To use the GPU:"] + [
        f"  {backend.value}: {' && '.join(commands) or 'runs here'}"
        for backend, commands in steps.items()
        if commands or (commands is not None and not have_failed)
    ]


def _steps(bundle: Bundle, backend: Backend, machine: ThisMachine) -> list[str] | None:
    """Commands after which a backend gets further on this GPU; None where it never runs on such a GPU."""
    assert machine.gpu is not None
    install = [] if backend in machine.versions else [_INSTALL[backend]]
    if backend is Backend.ONNXRUNTIME_CUDA:
        return install
    flavour = _FLAVOUR[backend]
    if not builds_for(flavour, machine.gpu.architecture):
        return None
    engine, reasons = _best_engine(bundle, backend, machine)
    fits = engine is not None and machine.gpu.architecture in engine.architectures
    if not reasons or (install and fits):
        return install
    if backend is Backend.TENSORRT_LEAN:
        builder = machine.versions.get(flavour)
        if builder is None:
            install.append(_INSTALL[flavour])
        elif not install and version_numbers(machine.versions[backend]) < version_numbers(builder):
            # An engine that TensorRT builds here, an older lean runtime does not run.
            return ["pip install -U 'hdexport[lean]'"]
    return [*install, shlex.join(_rebuild_command(bundle, backend, machine))]


def _rebuild_command(bundle: Bundle, backend: Backend, machine: ThisMachine) -> list[str]:
    flavour = _FLAVOUR[backend]
    command = ["hdexport", "rebuild", str(bundle.path), "--target", flavour.value.replace("_", "-")]
    assert machine.gpu is not None
    if flavour is Backend.TENSORRT_RTX and machine.gpu.architecture in TENSORRT_RTX_ON_REQUEST:
        command += ["--sm", machine.gpu.architecture.removeprefix("sm")]
    return [*command, "--version-compatible"] if backend is Backend.TENSORRT_LEAN else command


def _rebuilt_where_needed(bundle: Bundle, backends: list[Backend], machine: ThisMachine) -> Bundle:
    """The bundle with an engine that runs here, built if needed."""
    if _runs_on_any(bundle, backends, machine):
        return bundle
    assert machine.gpu is not None
    possible = [backend for backend in backends if builds_for(_FLAVOUR[backend], machine.gpu.architecture)]
    buildable = [backend for backend in possible if _FLAVOUR[backend] in machine.versions]
    if not buildable:
        missing = " or ".join(dict.fromkeys(_FLAVOUR[backend].value for backend in possible))
        unsupported = f"{' or '.join(backends)} supports no GPU of {machine.gpu.architecture}"
        why = f"{missing} is not installed" if missing else unsupported
        raise BackendUnavailableError(
            "\n".join([f"An engine for {machine.gpu.name} cannot be rebuilt here: {why}.", *_ways(bundle, machine)])
        )
    # Only here: a bundle can be run where files have no locks.
    from hdruntime.bundle.staging import locked_directory

    # The lock disappears with the replaced directory. Without locks, two rebuilds only waste time.
    with locked_directory(bundle.path, wait=True):
        # Another process may have rebuilt it while this one waited.
        bundle = open_bundle(bundle.path)
        if not _runs_on_any(bundle, backends, machine):
            _run_rebuild(bundle, buildable[0], machine)
            bundle = open_bundle(bundle.path)
            # Otherwise every start would rebuild the engine again, which takes minutes.
            _, reasons = _best_engine(bundle, buildable[0], machine)
            if reasons:
                raise BackendUnavailableError(
                    f"The engine of {bundle.path} was rebuilt and still cannot run here: {'; '.join(reasons)}.\n"
                    "Load the bundle without rebuild, with the backend onnxruntime."
                )
    return bundle


def _runs_on_any(bundle: Bundle, backends: list[Backend], machine: ThisMachine) -> bool:
    return any(not _best_engine(bundle, backend, machine)[1] for backend in backends)


def _run_rebuild(bundle: Bundle, backend: Backend, machine: ThisMachine) -> None:
    command = [sys.executable, "-c", _REBUILD, *_rebuild_command(bundle, backend, machine)[1:]]
    logger.warning("no engine of %s runs on this GPU: building one for %s", bundle.path, backend.value)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()[-_ERROR_LINES:]
        raise BackendError(f"Rebuilding the engine of {bundle.path} for {backend.value} failed:\n" + "\n".join(lines))


def _backend_of_name(name: str) -> Backend:
    try:
        return Backend(name)
    except ValueError:
        valid = ", ".join([_AUTO, *(backend.value for backend in Backend)])
        raise InputError(f"Unknown backend {name!r}; valid are {valid}.") from None
