"""How to use this machine's GPU for a bundle: the commands to type, and engines that are built as it is loaded."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence

from hdruntime.backends.entry import Asked, BackendEntry, ThisMachine
from hdruntime.backends.registry import backends
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import BackendError, BackendUnavailableError

logger = logging.getLogger(__name__)

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


def rebuilt_where_needed(bundle: Bundle, entries: Sequence[BackendEntry], asked: Asked) -> Bundle:
    """The bundle with an engine that one of the backends runs on this machine's GPU, built if needed."""
    if _runs_on_any(bundle, entries, asked):
        return bundle
    gpu = asked.on.gpu
    assert gpu is not None
    possible = [entry for entry in entries if entry.builds_for(gpu.architecture)]
    buildable = [entry for entry in possible if entry.has_builder(asked.on)]
    if not buildable:
        missing = " or ".join(dict.fromkeys(str(entry.variant) for entry in possible))
        unsupported = f"{' or '.join(entry.name for entry in entries)} supports no GPU of {gpu.architecture}"
        why = f"{missing} is not installed" if missing else unsupported
        raise BackendUnavailableError(
            "\n".join([f"An engine for {gpu.name} cannot be rebuilt here: {why}.", *ways(bundle, asked.on)])
        )
    # Only here: a bundle can be run where files have no locks.
    from hdruntime.bundle.staging import locked_directory

    # The lock disappears with the replaced directory. Without locks, two rebuilds only waste time.
    with locked_directory(bundle.path, wait=True):
        # Another process may have rebuilt it while this one waited.
        bundle = open_bundle(bundle.path)
        if not _runs_on_any(bundle, entries, asked):
            _run_rebuild(bundle, buildable[0], asked)
            bundle = open_bundle(bundle.path)
            # Otherwise every start would rebuild the engine again, which takes minutes.
            refusal = buildable[0].against(bundle, asked)
            if refusal is not None:
                raise BackendUnavailableError(
                    f"The engine of {bundle.path} was rebuilt and still cannot run here: {refusal.reason}.",
                    hint="Load the bundle without rebuild, with the backend onnxruntime.",
                )
    return bundle


def _runs_on_any(bundle: Bundle, entries: Sequence[BackendEntry], asked: Asked) -> bool:
    return any(entry.against(bundle, asked) is None for entry in entries)


def _run_rebuild(bundle: Bundle, entry: BackendEntry, asked: Asked) -> None:
    command = [sys.executable, "-c", _REBUILD, *entry.rebuild_command(bundle, asked.on)[1:]]
    name = entry.name
    logger.warning("no engine of %s runs on this GPU: building one for %s", bundle.path, name)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()[-_ERROR_LINES:]
        raise BackendError(f"Rebuilding the engine of {bundle.path} for {name} failed:\n" + "\n".join(lines))


def advice(entry: BackendEntry, bundle: Bundle, machine: ThisMachine) -> str:
    """What to do where a backend on a GPU cannot run a bundle."""
    if machine.gpu is None or machine.driver is None:
        return "Use the backend onnxruntime (or auto), which needs no GPU. See: hdexport doctor"
    steps = entry.steps(bundle, machine)
    if steps is None:
        line = f"{entry.name} supports no GPU of {machine.gpu.architecture}."
        return "\n".join([line, *ways(bundle, machine)])
    if steps[0].startswith("hdexport"):
        return (
            f"Rebuild the engine on this machine: {steps[0]}\n"
            "or load the bundle with rebuild=True, in a job hdexport run --rebuild."
        )
    return f"Install it with: {' && '.join(steps)}"


def ways(bundle: Bundle, machine: ThisMachine, *, have_failed: bool = False) -> list[str]:
    """Lines that say how to use a machine's GPU: by an engine, of the bundle's own variant if possible, and by a graph.
    With `have_failed`, backends that nothing speaks against are not among them: they were tried."""
    on_gpu = [entry for entry in backends() if entry.needs_gpu and entry.is_advised]
    own = [entry for entry in on_gpu if entry.is_built_into(bundle)]
    if all(entry.steps(bundle, machine) is None for entry in own if entry.variant is not None):
        own.insert(0, on_gpu[0])
    steps = {entry.name: entry.steps(bundle, machine) for entry in own}
    return ["To use the GPU:"] + [
        f"  {name}: {' && '.join(commands) or 'runs here'}"
        for name, commands in steps.items()
        if commands or (commands is not None and not have_failed)
    ]
