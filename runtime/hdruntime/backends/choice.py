"""The choice of the backend for a bundle: the requested one, or the first that can run; rebuilds engines on request."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Sequence

from hdruntime.backends import Runner
from hdruntime.backends.entry import Asked, BackendEntry, ThisMachine
from hdruntime.backends.precision import Precision
from hdruntime.backends.rebuilding import advice, rebuilt_where_needed, ways
from hdruntime.backends.registry import backend_named, backend_names, backends, computing_in, this_machine
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendError, BackendUnavailableError, HdexportError, InputError, MissingDependencyError
from hdruntime.gpu.options import GpuOptions

logger = logging.getLogger(__name__)

_AUTO = "auto"
_ASKED = "asked for"

_CPU = "cpu"
_CUDA = re.compile(r"cuda(?::(\d+))?")
"""Names of devices as PyTorch has them."""


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

    Returns the bundle, opened again if it was rebuilt, its runner, and the reason for the choice, which is also logged:
    as a warning if a GPU stays unused.
    """
    chosen = None if backend == _AUTO else _backend_of_name(backend)
    gpu = gpu or GpuOptions()
    needs_gpu = _CUDA.fullmatch(device or "")
    if needs_gpu:
        gpu = dataclasses.replace(gpu, device=int(needs_gpu[1] or gpu.device))
    is_on_cpu = device == _CPU
    if chosen is not None and (needs_gpu or is_on_cpu) and chosen.needs_gpu == is_on_cpu:
        fitting = ", ".join(entry.name for entry in backends() if entry.needs_gpu != is_on_cpu)
        raise BackendUnavailableError(
            f"The backend {chosen.name} does not run on the device {device}; {fitting} do.",
            hint="Leave out the device, or the backend.",
        )
    own_device = None if needs_gpu or is_on_cpu else device
    asked = Asked(threads, precision, own_device, gpu)
    if chosen is None and (is_on_cpu or own_device is not None):
        runner, why = _first_on_cpu(bundle, asked)
        return bundle, runner, f"device {device}; {why}" if is_on_cpu else why
    if chosen is not None and not chosen.needs_gpu:
        return bundle, _opened(chosen, bundle, asked), _ASKED
    asked = asked._replace(machine=machine or this_machine(gpu.device))
    if rebuild and asked.on.gpu is not None:
        builders = [entry for entry in ([chosen] if chosen else backends()) if entry.variant is not None]
        if builders:
            bundle = rebuilt_where_needed(bundle, builders, asked)
    if chosen is not None:
        return bundle, _opened(chosen, bundle, asked), _ASKED
    runner, reason = _first_that_runs(bundle, asked, needs_gpu=needs_gpu is not None)
    return bundle, runner, reason


def why_unavailable(
    bundle: Bundle,
    backend: Backend,
    *,
    precision: Precision = Precision.AUTO,
    machine: ThisMachine | None = None,
) -> str | None:
    """Why a backend cannot run a bundle, and the remedy; None if it can. `machine` is by default this one."""
    entry = _backend_of_name(backend)
    asked = Asked(precision=precision, machine=(machine or this_machine()) if entry.needs_gpu else None)
    found = _refusal(entry, bundle, asked)
    return entry.why_unavailable(bundle, asked) if found is None else found[0]


def _refusal(entry: BackendEntry, bundle: Bundle, asked: Asked) -> tuple[str, type[HdexportError]] | None:
    """Message and class of the error for a backend that cannot run; None if nothing speaks against it."""
    found = entry.against(bundle, asked)
    if found is None:
        return None
    what = found.what or f"{entry.name} with {bundle.path}"
    remedy = advice(entry, bundle, asked.on) if found.advice is None else found.advice
    message = f"{what} cannot run here: {found.reason}.\n{remedy}"
    return message, MissingDependencyError if found.is_missing else BackendUnavailableError


def _opened(entry: BackendEntry, bundle: Bundle, asked: Asked) -> Runner:
    """Load a bundle with a backend, or say why it cannot."""
    name, device = entry.name, asked.device
    if device is not None and not entry.devices:
        others = [other for other in backends() if other.devices]
        raise BackendUnavailableError(
            f"{name} does not take the device {device!r}, which is one of {others[0].library}'s.",
            hint=f"Leave it out, or use the backend {others[0].name}. An NVIDIA GPU is chosen by "
            "GpuOptions(device=...).",
        )
    if entry.needs_gpu and asked.precision is not Precision.AUTO:
        fitting = " or ".join(other.name for other in computing_in(asked.precision))
        raise BackendUnavailableError(
            f"{name} does not take the precision {asked.precision}: on a GPU a bundle computes in the "
            "precision that it was built in, by --fp16 or --bf16.",
            hint=f"Leave it out, or use the backend {fitting}.",
        )
    found = _refusal(entry, bundle, asked)
    if found is not None:
        message, error = found
        raise error(message)
    return entry.open(bundle, asked)


def _first_on_cpu(bundle: Bundle, asked: Asked) -> tuple[Runner, str]:
    """The runner of the first backend on the CPU that prefers this bundle and loads it, and why."""
    is_auto = asked.precision is Precision.AUTO
    ready = [entry for entry in backends() if not entry.needs_gpu] if is_auto else computing_in(asked.precision)
    if asked.device is not None:
        ready = [entry for entry in ready if entry.devices]
    if len(ready) == 1:
        place = f"in {asked.precision} on a CPU" if asked.device is None else f"with device {asked.device}"
        return _opened(ready[0], bundle, asked), f"the only one {place}"
    why = ""
    for entry in ready:
        takes, said = entry.preference(bundle, asked)
        why = said or why
        if not takes and entry is not ready[-1]:
            continue
        try:
            return _opened(entry, bundle, asked), why
        except BackendError as error:
            if entry is ready[-1]:
                raise
            # All checks passed, so the failure deserves a warning.
            logger.warning("backend auto: %s should run here and does not: %s", entry.name, error)
            why = f"{entry.library} does not load its graph"
    raise AssertionError("no backend runs on the CPU")


def _first_that_runs(bundle: Bundle, asked: Asked, *, needs_gpu: bool) -> tuple[Runner, str]:
    machine = asked.on
    if asked.precision is not Precision.AUTO:
        runner, why = _first_on_cpu(bundle, asked)
        reason = f"{asked.precision} is a precision of CPUs; {why}"
        logger.info("backend auto: chose %s: %s", runner.backend, reason)
        return runner, reason
    on_gpu = [entry for entry in backends() if entry.needs_gpu and entry.is_built_into(bundle)]
    for entry in on_gpu:
        name = entry.name
        refusal = entry.against(bundle, asked)
        if refusal is not None:
            logger.info("backend auto: not %s: %s", name, refusal.reason)
            continue
        try:
            runner = _opened(entry, bundle, asked)
        except BackendError as error:
            # All checks passed, so the failure deserves a warning.
            logger.warning("backend auto: %s should run here and does not: %s", name, error)
            continue
        assert machine.gpu is not None
        reason = f"the first that runs on {machine.gpu.name}"
        logger.info("backend auto: chose %s, %s", name, reason)
        return runner, reason
    reason = machine.why_no_gpu if machine.gpu is None else f"no backend that is installed uses {machine.gpu.name}"
    if needs_gpu:
        lines = ways(bundle, machine, have_failed=True) if machine.gpu else ["Leave out the device to run on the CPU."]
        raise BackendUnavailableError("\n".join([f"{bundle.path} cannot run on the device cuda: {reason}.", *lines]))
    runner, why = _first_on_cpu(bundle, asked)
    name = runner.backend
    if machine.gpu is not None:
        logger.warning("%s", _unused_gpu(bundle, asked, on_gpu, name))
    elif machine.listed_gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:
        logger.warning("backend auto: chose %s, on the CPU: %s; %s.\nSee: hdexport doctor", name, reason, why)
    else:
        logger.info("backend auto: chose %s: %s; %s", name, reason, why)
    return runner, f"{reason}; {why}"


def _unused_gpu(bundle: Bundle, asked: Asked, on_gpu: Sequence[BackendEntry], chosen: str) -> str:
    """The warning for an unused GPU: the missing packages, and the command to type."""
    assert asked.on.gpu is not None
    refusals = {entry.name: entry.against(bundle, asked) for entry in on_gpu}
    return "\n".join([
        f"backend auto: chose {chosen}, on the CPU, although there is a GPU ({asked.on.gpu.name}).",
        *(f"{name} cannot run here: {found.reason}." for name, found in refusals.items() if found),
        *ways(bundle, asked.on, have_failed=True),
    ])  # fmt: skip


def _backend_of_name(name: str) -> BackendEntry:
    found = backend_named(name)
    if found is None:
        raise InputError(f"Unknown backend {name!r}; valid are {', '.join([_AUTO, *backend_names()])}.")
    return found
