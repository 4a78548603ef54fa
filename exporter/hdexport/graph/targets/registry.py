"""The registry of targets: the folders beside this file."""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
from collections.abc import Sequence

import hdexport.graph.targets
from hdexport.graph.targets.target import Target
from hdruntime.bundle.manifest import Backend

logger = logging.getLogger(__name__)

AUTO, ONNX = "auto", "onnx"


@functools.cache
def targets() -> tuple[Target, ...]:
    """Every target, by name."""
    entries = [
        target
        for module in pkgutil.iter_modules(hdexport.graph.targets.__path__)
        if module.ispkg
        for target in importlib.import_module(f"hdexport.graph.targets.{module.name}.target").TARGETS
    ]
    return tuple(sorted(entries, key=lambda target: target.name))


def target_names() -> list[str]:
    """The values of ``--target``."""
    return [AUTO, *(target.name for target in targets())]


def target_of(lowering: str) -> Target | None:
    """The target that writes graphs of a lowering, or None."""
    return next((target for target in targets() if lowering in target.lowerings), None)


def chosen_targets(names: Sequence[str]) -> tuple[Target, ...]:
    """The targets of the values of ``--target`` except ``onnx``, in the order of the values.

    A build fails if a named target cannot be built; ``auto`` takes the targets that are possible on this machine.
    """
    chosen: dict[str, Target] = {}
    by_name = {target.name: target for target in targets() if target.name != ONNX}
    for name in names:
        if name == AUTO:
            chosen |= {each: target for each, target in by_name.items() if each not in chosen and target.is_possible()}
        elif name in by_name:
            chosen[name] = by_name[name]
    for name in names:
        if name in by_name:
            by_name[name].require()
    return tuple(chosen.values())


def graph_targets(chosen: Sequence[Target]) -> tuple[str, ...]:
    """Names of the targets that write graphs."""
    return tuple(target.name for target in chosen if target.variant is None)


def variants_of(chosen: Sequence[Target]) -> tuple[Backend, ...]:
    """TensorRT variants of the targets that build engines."""
    variants = tuple(target.variant for target in chosen if target.variant is not None)
    logger.info("engines to build: %s", ", ".join(variants) or "none")
    return variants


def targets_named(names: Sequence[str]) -> list[Target]:
    return [target for target in targets() if target.name in names]
