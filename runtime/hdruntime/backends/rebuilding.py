"""Commands that make this machine's GPU usable for a bundle, and engines that are rebuilt when a bundle is loaded."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence

from hdruntime.backends.entry import BackendEntry, LoadOptions, ThisMachine
from hdruntime.backends.registry import backends
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import BackendError, BackendUnavailableError, Message, Setting

logger = logging.getLogger(__name__)

_ERROR_LINES = 20
"""Number of lines of a failed rebuild's output that are shown; the reason is at the end."""


def rebuilt_where_needed(bundle: Bundle, entries: Sequence[BackendEntry], options: LoadOptions) -> Bundle:
    """Return the bundle with an engine that one of the backends runs on this machine's GPU; build it if needed."""
    if _runs_on_any(bundle, entries, options):
        return bundle
    machine = options.gpu_machine
    gpu = machine.gpu
    assert gpu is not None
    possible = [entry for entry in entries if entry.builds_for(gpu.architecture)]
    buildable = [entry for entry in possible if entry.has_builder(machine)]
    if not buildable:
        missing = " or ".join(dict.fromkeys(str(entry.variant) for entry in possible))
        unsupported = f"{' or '.join(entry.name for entry in entries)} supports no GPU of {gpu.architecture}."
        raise BackendUnavailableError(
            f"An engine for {gpu.name} cannot be rebuilt on this machine. ",
            f"{missing} is not installed." if missing else unsupported,
            hint="\n".join(gpu_setup_lines(bundle, machine)),
        )
    # Imported here: a bundle can run where files have no locks.
    from hdruntime.bundle.staging import locked_directory

    # The lock disappears with the replaced directory. Without locks, two rebuilds only waste time.
    with locked_directory(bundle.path, wait=True):
        # Another process may have rebuilt the bundle while this process waited.
        bundle = open_bundle(bundle.path)
        if not _runs_on_any(bundle, entries, options):
            _run_rebuild(bundle, buildable[0], options)
            bundle = open_bundle(bundle.path)
            # Otherwise every start would rebuild the engine again, which takes minutes.
            unavailable = buildable[0].unavailable_reason(bundle, options)
            if unavailable is not None:
                raise BackendUnavailableError(
                    f"The engine of {bundle.path} was rebuilt and still cannot run on this machine. ",
                    unavailable.reason,
                    hint="Load the bundle without rebuild, with the backend onnxruntime.",
                )
    return bundle


def _runs_on_any(bundle: Bundle, entries: Sequence[BackendEntry], options: LoadOptions) -> bool:
    return any(entry.unavailable_reason(bundle, options) is None for entry in entries)


def _run_rebuild(bundle: Bundle, entry: BackendEntry, options: LoadOptions) -> None:
    # A process: the runtime imports no code for building, and the memory of a build is freed when the process ends.
    command = [sys.executable, "-m", *entry.rebuild_command(bundle, options.gpu_machine)]
    logger.warning("no engine of %s runs on this GPU: building one for %s", bundle.path, entry.name)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()[-_ERROR_LINES:]
        raise BackendError(f"Rebuilding the engine of {bundle.path} for {entry.name} failed:\n" + "\n".join(lines))


def gpu_hint(entry: BackendEntry, bundle: Bundle, machine: ThisMachine) -> Message:
    """What to do where a backend on a GPU cannot run a bundle."""
    if machine.gpu is None or machine.driver is None:
        return "Use the backend onnxruntime or auto, which need no GPU. See: hdexport doctor"
    commands = entry.setup_commands(bundle, machine)
    if commands is None:
        unsupported = f"{entry.name} supports no GPU of {machine.gpu.architecture}."
        return "\n".join([unsupported, *gpu_setup_lines(bundle, machine)])
    if commands.install:
        return f"Install it with: {commands}"
    return (
        f"Rebuild the engine on this machine: {commands}\nor load the bundle with ",
        Setting("rebuild", True),
        ".",
    )


def gpu_setup_lines(bundle: Bundle, machine: ThisMachine, *, have_failed: bool = False) -> list[str]:
    """Lines that list the ways to use a machine's GPU: an engine, of the bundle's TensorRT variant if possible, and a
    graph. With `have_failed`, backends that need no command are left out: they were tried."""
    on_gpu = [entry for entry in backends() if entry.needs_gpu and entry.is_advised]
    listed = [entry for entry in on_gpu if entry.is_built_into(bundle)]
    if all(entry.setup_commands(bundle, machine) is None for entry in listed if entry.variant is not None):
        listed.insert(0, on_gpu[0])
    commands_by_name = {entry.name: entry.setup_commands(bundle, machine) for entry in listed}
    return ["To use the GPU:"] + [
        f"  {name}: {str(commands) or 'runs here'}"
        for name, commands in commands_by_name.items()
        if commands is not None and (str(commands) or not have_failed)
    ]
