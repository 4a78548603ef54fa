"""The choice of the backend for a bundle: the requested backend, or the first that runs."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Sequence

from hdruntime.backends import Runner
from hdruntime.backends.entry import BackendEntry, LoadOptions, ThisMachine, UnavailableReason
from hdruntime.backends.precision import Precision
from hdruntime.backends.rebuilding import gpu_setup_lines, rebuilt_where_needed
from hdruntime.backends.registry import backend_named, backend_names, backends, computing_in, this_machine
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendError, BackendUnavailableError, InputError, Setting
from hdruntime.gpu.options import GpuOptions

logger = logging.getLogger(__name__)

_AUTO = "auto"
_REQUESTED = "The backend was requested."

_CPU = "cpu"
_CUDA = re.compile(r"cuda(?::(\d+))?")
"""Names of devices in PyTorch."""


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
    """Load a bundle's graph or engine with a backend; arguments and errors are those of `hdruntime.load`.

    Returns the bundle, opened again if it was rebuilt, the runner, and the reason for the choice in sentences. The
    reason is also logged: as a warning if a GPU stays unused.
    """
    requested = None if backend == _AUTO else _backend_of_name(backend)
    gpu = gpu or GpuOptions()
    cuda = _CUDA.fullmatch(device or "")
    if cuda:
        gpu = dataclasses.replace(gpu, device=int(cuda[1] or gpu.device))
    is_on_cpu = device == _CPU
    if requested is not None and (cuda or is_on_cpu) and requested.needs_gpu == is_on_cpu:
        fitting = ", ".join(entry.name for entry in backends() if entry.needs_gpu != is_on_cpu)
        raise BackendUnavailableError(
            f"The backend {requested.name} does not run on the device {device}; {fitting} do.",
            hint="Leave out the device, or the backend.",
        )
    backend_device = None if cuda or is_on_cpu else device
    options = LoadOptions(threads=threads, precision=precision, device=backend_device, gpu=gpu)
    if requested is None and (is_on_cpu or backend_device is not None):
        return bundle, *_first_on_cpu(bundle, options)
    if requested is not None and not requested.needs_gpu:
        return bundle, _opened(requested, bundle, options), _REQUESTED
    options = dataclasses.replace(options, machine=machine or this_machine(gpu.device))
    if rebuild and options.gpu_machine.gpu is not None:
        builders = [entry for entry in ([requested] if requested else backends()) if entry.variant is not None]
        if builders:
            bundle = rebuilt_where_needed(bundle, builders, options)
    if requested is not None:
        return bundle, _opened(requested, bundle, options), _REQUESTED
    return bundle, *_first_that_runs(bundle, options, needs_gpu=cuda is not None)


def unavailable_reason(
    bundle: Bundle,
    backend: Backend,
    *,
    precision: Precision = Precision.AUTO,
    machine: ThisMachine | None = None,
) -> UnavailableReason | None:
    """Why a backend cannot run a bundle, or None. `machine` is by default this machine."""
    entry = _backend_of_name(backend)
    machine = (machine or this_machine()) if entry.needs_gpu else None
    return entry.unavailable_reason(bundle, LoadOptions(precision=precision, machine=machine))


def _opened(entry: BackendEntry, bundle: Bundle, options: LoadOptions) -> Runner:
    """Load a bundle with a backend, or raise the reason why the backend cannot."""
    device, precision = options.device, options.precision
    if device is not None and not entry.devices:
        others = [other for other in backends() if other.devices]
        raise BackendUnavailableError(
            f"{entry.name} does not take the device {device!r}, which is a device of {others[0].library}.",
            hint=f"Leave it out, or use the backend {others[0].name}. GpuOptions(device=...) chooses an NVIDIA GPU.",
        )
    if entry.needs_gpu and precision is not Precision.AUTO:
        fitting = " or ".join(other.name for other in computing_in(precision))
        raise BackendUnavailableError(
            f"{entry.name} does not take the precision {precision}: on a GPU a bundle computes in the precision that "
            "the bundle was built in, by ",
            Setting("fp16", command="build"),
            " or ",
            Setting("bf16", command="build"),
            ".",
            hint=f"Leave it out, or use the backend {fitting}.",
        )
    unavailable = entry.unavailable_reason(bundle, options)
    if unavailable is not None:
        raise unavailable.error(entry.name, bundle)
    return entry.open(bundle, options)


def _first_on_cpu(bundle: Bundle, options: LoadOptions) -> tuple[Runner, str]:
    """The runner of the first backend on the CPU that prefers this bundle and loads it, and the reason."""
    is_auto = options.precision is Precision.AUTO
    candidates = [entry for entry in backends() if not entry.needs_gpu] if is_auto else computing_in(options.precision)
    if options.device is not None:
        candidates = [entry for entry in candidates if entry.devices]
    if len(candidates) == 1:
        ability = (
            f"computes in {options.precision} on a CPU"
            if options.device is None
            else f"has the device {options.device}"
        )
        return _opened(candidates[0], bundle, options), f"No other backend {ability}."
    reason = ""
    for entry in candidates:
        preference = entry.preference(bundle, options)
        reason = preference.reason or reason
        is_last = entry is candidates[-1]
        if not preference.is_preferred and not is_last:
            continue
        try:
            return _opened(entry, bundle, options), reason
        except BackendError as error:
            if is_last:
                raise
            # All checks passed, so the failure deserves a warning.
            logger.warning("backend auto: %s should run here and does not: %s", entry.name, error)
            reason = f"{entry.library} does not load the bundle's graph."
    raise AssertionError("no backend runs on the CPU")


def _first_that_runs(bundle: Bundle, options: LoadOptions, *, needs_gpu: bool) -> tuple[Runner, str]:
    machine = options.gpu_machine
    if options.precision is not Precision.AUTO:
        runner, reason = _first_on_cpu(bundle, options)
        reason = f"The precision {options.precision} is for CPUs. {reason}"
        logger.info("backend auto: chose %s. %s", runner.backend, reason)
        return runner, reason
    on_gpu = [entry for entry in backends() if entry.needs_gpu and entry.is_built_into(bundle)]
    for entry in on_gpu:
        unavailable = entry.unavailable_reason(bundle, options)
        if unavailable is not None:
            logger.info("backend auto: not %s. %s", entry.name, unavailable.reason)
            continue
        try:
            runner = _opened(entry, bundle, options)
        except BackendError as error:
            # All checks passed, so the failure deserves a warning.
            logger.warning("backend auto: %s should run here and does not: %s", entry.name, error)
            continue
        assert machine.gpu is not None
        reason = f"It is the first backend that runs on {machine.gpu.name}."
        logger.info("backend auto: chose %s. %s", entry.name, reason)
        return runner, reason
    no_gpu = machine.no_gpu_reason if machine.gpu is None else f"No installed backend uses {machine.gpu.name}."
    if needs_gpu:
        raise BackendUnavailableError(
            f"{bundle.path} cannot run on the device cuda. {no_gpu}",
            hint=(
                "\n".join(gpu_setup_lines(bundle, machine, have_failed=True))
                if machine.gpu
                else "Leave out the device to run on the CPU."
            ),
        )
    runner, reason = _first_on_cpu(bundle, options)
    reason = f"{no_gpu} {reason}"
    if machine.gpu is not None:
        logger.warning("%s", _unused_gpu(bundle, options, on_gpu, runner.backend))
    elif machine.listed_gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:
        logger.warning("backend auto: chose %s, on the CPU. %s\nSee: hdexport doctor", runner.backend, reason)
    else:
        logger.info("backend auto: chose %s. %s", runner.backend, reason)
    return runner, reason


def _unused_gpu(bundle: Bundle, options: LoadOptions, on_gpu: Sequence[BackendEntry], chosen: str) -> str:
    """The warning for an unused GPU: the missing packages, and the command to type."""
    machine = options.gpu_machine
    assert machine.gpu is not None
    reasons = {entry.name: entry.unavailable_reason(bundle, options) for entry in on_gpu}
    return "\n".join([
        f"backend auto: chose {chosen}, on the CPU, although there is a GPU ({machine.gpu.name}).",
        *(f"{name} cannot run here. {unavailable.reason}" for name, unavailable in reasons.items() if unavailable),
        *gpu_setup_lines(bundle, machine, have_failed=True),
    ])  # fmt: skip


def _backend_of_name(name: str) -> BackendEntry:
    entry = backend_named(name)
    if entry is None:
        raise InputError(
            parameter="backend", value=str(name), accepted=f"one of {', '.join([_AUTO, *backend_names()])}"
        )
    return entry
