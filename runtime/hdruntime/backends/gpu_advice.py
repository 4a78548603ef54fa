"""How to use a machine's GPU for a bundle: the commands to type."""

from __future__ import annotations

from hdruntime.backends.entry import BackendEntry
from hdruntime.backends.registry import backends
from hdruntime.backends.this_machine import ThisMachine
from hdruntime.bundle.reader import Bundle


def advice(entry: BackendEntry, bundle: Bundle, machine: ThisMachine) -> str:
    """What to do where a backend on a GPU cannot run a bundle."""
    if machine.gpu is None or machine.driver is None:
        return "Use the backend onnxruntime (or auto), which needs no GPU. See: hdexport doctor"
    steps = entry.steps(bundle, machine)
    if steps is None:
        line = f"{entry.name.value} supports no GPU of {machine.gpu.architecture}."
        return "\n".join([line, *ways(bundle, machine)])
    if steps[0].startswith("hdexport"):
        return (
            f"Rebuild the engine on this machine: {steps[0]}\n"
            "or load the bundle with rebuild=True, in a job hdexport run --rebuild."
        )
    return f"Install it with: {' && '.join(steps)}"


def ways(bundle: Bundle, machine: ThisMachine, *, have_failed: bool = False) -> list[str]:
    """Lines that say how to use a machine's GPU: by an engine, of the bundle's own flavour if possible, and by a graph.
    With `have_failed`, backends that nothing speaks against are not among them: they were tried."""
    on_gpu = [entry for entry in backends() if entry.needs_gpu and entry.is_advised]
    own = [entry for entry in on_gpu if entry.is_built_into(bundle)]
    if all(entry.steps(bundle, machine) is None for entry in own if entry.flavour is not None):
        own.insert(0, on_gpu[0])
    steps = {entry.name.value: entry.steps(bundle, machine) for entry in own}
    return ["To use the GPU:"] + [
        f"  {name}: {' && '.join(commands) or 'runs here'}"
        for name, commands in steps.items()
        if commands or (commands is not None and not have_failed)
    ]
