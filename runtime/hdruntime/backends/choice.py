"""The choice of the backend for a bundle: the requested one, or the first that can run; rebuilds engines on request."""

from __future__ import annotations

__all__ = ["open_runner", "why_unavailable"]

import dataclasses
import logging
import subprocess
import sys

from hdruntime.backends import Runner
from hdruntime.bundle.manifest import Backend, EngineFile
from hdruntime.bundle.passport import ThisMachine, differences, older_driver, read_passport, this_machine
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import BackendError, BackendUnavailableError, InputError
from hdruntime.gpu.options import GpuOptions
from hdruntime.optional import INSTALL_ONNXRUNTIME_CUDA

logger = logging.getLogger(__name__)

_AUTO = "auto"

_FLAVOUR = {
    Backend.TENSORRT: Backend.TENSORRT,
    Backend.TENSORRT_RTX: Backend.TENSORRT_RTX,
    # TensorRT builds the lean runtime's engines.
    Backend.TENSORRT_LEAN: Backend.TENSORRT,
}
"""Backend for engines -> flavour of these engines, in the order that ``auto`` tries."""

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
"""Of a failed rebuild's output; the reason is at the end."""


def open_runner(
    bundle: Bundle,
    backend: Backend | str,
    *,
    threads: int | None,
    rebuild: bool = False,
    gpu: GpuOptions | None = None,
    machine: ThisMachine | None = None,
) -> tuple[Bundle, Runner]:
    """Load a bundle's graph or engine with a backend.

    Args:
        bundle: an opened bundle.
        backend: one of :class:`Backend`, which runs or raises, or ``auto``: the first that can run here,
            TensorRT engines first, then ONNX Runtime on the GPU. The choice and its reason are logged, as a warning if
            a GPU stays unused.
        threads: CPU threads of one run; None leaves the number to the backend.
        rebuild: build an engine if the bundle has none that runs on this machine's GPU.
        gpu: options of backends on a GPU, by default ``GpuOptions()``.
        machine: the machine to run on, by default this one.

    Returns:
        the bundle, opened again if it was rebuilt, and its runner.

    Raises:
        InputError: the backend is unknown.
        BackendUnavailableError: the requested backend cannot run here, or cannot run this bundle.
        BackendError: it could not load the bundle, or a rebuild failed.
    """
    chosen = None if backend == _AUTO else _backend_of_name(backend)
    if chosen is Backend.ONNXRUNTIME:
        return bundle, _onnxruntime(bundle, threads)
    gpu = gpu or GpuOptions()
    machine = machine or this_machine(gpu.device)
    if rebuild and machine.gpu is not None and chosen is not Backend.ONNXRUNTIME_CUDA:
        bundle = _rebuilt_where_needed(bundle, list(_FLAVOUR) if chosen is None else [chosen], machine)
    if chosen is not None:
        return bundle, _gpu_runner(bundle, chosen, machine, gpu, threads)
    return bundle, _first_that_runs(bundle, machine, threads, gpu)


def why_unavailable(bundle: Bundle, backend: Backend, *, machine: ThisMachine | None = None) -> str | None:
    """Why a backend cannot run a bundle, and what to do about it; None if it can.

    Args:
        bundle: an opened bundle.
        backend: requested by name.
        machine: the machine to run on, by default this one.
    """
    if backend is Backend.ONNXRUNTIME:
        return None
    machine = machine or this_machine()
    reasons = _reasons_against(bundle, backend, machine)
    if not reasons:
        return None
    engine = None if backend is Backend.ONNXRUNTIME_CUDA else _best_engine(bundle, backend, machine)[0]
    what = f"The engine {engine.file} of {bundle.path}" if engine else f"{backend.value} with {bundle.path}"
    return f"{what} cannot run here: {'; '.join(reasons)}.\n{_advice(bundle, backend, machine)}"


def _first_that_runs(bundle: Bundle, machine: ThisMachine, threads: int | None, gpu: GpuOptions) -> Runner:
    with_engines = [backend for backend in _FLAVOUR if _engines(bundle, backend)]
    for backend in (*with_engines, Backend.ONNXRUNTIME_CUDA):
        refusal = _reasons_against(bundle, backend, machine)
        if refusal:
            logger.info("backend auto: not %s: %s", backend.value, "; ".join(refusal))
            continue
        try:
            runner = _gpu_runner(bundle, backend, machine, gpu, threads)
        except BackendError as error:
            # All checks passed, so the failure deserves a warning.
            logger.warning("backend auto: %s should run here and does not: %s", backend.value, error)
            continue
        logger.info("backend auto: chose %s; nothing speaks against it", backend.value)
        return runner
    if machine.gpu is None:
        logger.info("backend auto: chose onnxruntime; there is no GPU here")
    else:
        logger.warning("%s", _unused_gpu(bundle, machine))
    return _onnxruntime(bundle, threads)


def _unused_gpu(bundle: Bundle, machine: ThisMachine) -> str:
    """The warning for an unused GPU: what is missing, and what to type."""
    backends = [backend for backend in _FLAVOUR if _engines(bundle, backend)]
    refusals = [why_unavailable(bundle, backend, machine=machine) for backend in (*backends, Backend.ONNXRUNTIME_CUDA)]
    assert machine.gpu is not None
    return "\n".join([
        f"backend auto: chose onnxruntime, on the CPU, although there is a GPU ({machine.gpu.name}).",
        *(refusal for refusal in refusals if refusal is not None),
    ])  # fmt: skip


def _onnxruntime(bundle: Bundle, threads: int | None) -> Runner:
    from hdruntime.backends.onnxruntime import OnnxRuntimeRunner

    return OnnxRuntimeRunner(bundle, threads=threads)


def _gpu_runner(bundle: Bundle, backend: Backend, machine: ThisMachine, gpu: GpuOptions, threads: int | None) -> Runner:
    refusal = why_unavailable(bundle, backend, machine=machine)
    if refusal is not None:
        raise BackendUnavailableError(refusal)
    if backend is Backend.ONNXRUNTIME_CUDA:
        from hdruntime.backends.onnxruntime_cuda import OnnxRuntimeCudaRunner

        return OnnxRuntimeCudaRunner(bundle, gpu=gpu, threads=threads)
    return _engine_runner(bundle, backend, machine, gpu)


def _engine_runner(bundle: Bundle, backend: Backend, machine: ThisMachine, gpu: GpuOptions) -> Runner:
    options = dataclasses.asdict(gpu)
    limit_bytes = options.pop("memory_limit_bytes")
    if limit_bytes is not None:
        raise BackendUnavailableError(
            f"{backend.value} holds no memory_limit_bytes ({limit_bytes}): an engine's memory was planned when it was "
            "built.\nLeave it out, or use the backend onnxruntime_cuda."
        )
    engine, _ = _best_engine(bundle, backend, machine)
    assert engine is not None
    remark = older_driver(read_passport(bundle, engine), machine)
    if remark is not None:
        logger.warning("%s: %s", engine.file, remark)
    from hdruntime.backends.tensorrt import TensorRtRunner

    return TensorRtRunner(bundle, engine, backend=backend, **options)


def _reasons_against(bundle: Bundle, backend: Backend, machine: ThisMachine) -> tuple[str, ...]:
    """Why a backend on a GPU cannot run a bundle; empty if it can."""
    if backend is not Backend.ONNXRUNTIME_CUDA:
        return _best_engine(bundle, backend, machine)[1]
    if machine.gpu is None:
        return ("CUDA sees no GPU here",)
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
    if backend is Backend.ONNXRUNTIME_CUDA or backend not in machine.versions:
        return f"Install it with: {_INSTALL[backend]}"
    compatible = " --version-compatible" if backend is Backend.TENSORRT_LEAN else ""
    target = _FLAVOUR[backend].value.replace("_", "-")
    return (
        f"Rebuild the engine on this machine: hdexport rebuild {bundle.path} --target {target}{compatible}\n"
        f"or load the bundle with rebuild=True, on the command line --rebuild."
    )


def _rebuilt_where_needed(bundle: Bundle, backends: list[Backend], machine: ThisMachine) -> Bundle:
    """The bundle with an engine that runs here, built if needed."""
    if _runs_on_any(bundle, backends, machine):
        return bundle
    flavours = [backend for backend in backends if backend in (Backend.TENSORRT, Backend.TENSORRT_RTX)]
    buildable = [flavour for flavour in flavours if flavour in machine.versions]
    if not buildable:
        wanted = " or ".join(_FLAVOUR[backend].value for backend in backends if backend in _FLAVOUR.values())
        raise BackendUnavailableError(
            f"An engine cannot be rebuilt here: {wanted or 'what builds it, tensorrt,'} is not installed.\n"
            f"Install it with: {_INSTALL[(flavours or [Backend.TENSORRT])[0]]}"
        )
    # Only here: a bundle can be run where files have no locks.
    from hdruntime.bundle.staging import locked_directory

    # The lock disappears with the replaced directory. Without locks, two rebuilds only waste time.
    with locked_directory(bundle.path, wait=True):
        # Another process may have rebuilt it while this one waited.
        bundle = open_bundle(bundle.path)
        if not _runs_on_any(bundle, backends, machine):
            _run_rebuild(bundle, buildable[0])
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


def _run_rebuild(bundle: Bundle, flavour: Backend) -> None:
    target = flavour.value.replace("_", "-")
    command = [sys.executable, "-c", _REBUILD, "rebuild", str(bundle.path), "--target", target]
    logger.warning("no engine of %s runs on this GPU: building one for %s", bundle.path, flavour.value)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()[-_ERROR_LINES:]
        raise BackendError(f"Rebuilding the engine of {bundle.path} for {target} failed:\n" + "\n".join(lines))


def _backend_of_name(name: str) -> Backend:
    try:
        return Backend(name)
    except ValueError:
        valid = ", ".join([_AUTO, *(backend.value for backend in Backend)])
        raise InputError(f"Unknown backend {name!r}; valid are {valid}.") from None
