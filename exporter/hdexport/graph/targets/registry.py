"""The targets there are: those of the folders beside this file, and those that other packages register."""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
from collections.abc import Sequence

import hdexport.graph.targets
from hdexport.graph.targets.target import Target
from hdruntime.bundle.manifest import Backend
from hdruntime.optional import BACKENDS_GROUP, TARGET, entry_points_of, made_by

logger = logging.getLogger(__name__)

AUTO, ONNX = "auto", "onnx"


@functools.cache
def targets() -> tuple[Target, ...]:
    """Every target, by name."""
    ours = (
        target
        for module in pkgutil.iter_modules(hdexport.graph.targets.__path__)
        if module.ispkg
        for target in importlib.import_module(f"hdexport.graph.targets.{module.name}.target").TARGETS
    )
    points = [point for name, point in entry_points_of(BACKENDS_GROUP).items() if name.endswith(TARGET)]
    others = filter(None, (made_by(point, "target") for point in points))
    return tuple(sorted((*ours, *others), key=lambda target: target.name))


def target_names() -> list[str]:
    """The values of ``--target``."""
    return [AUTO, *(target.name for target in targets())]


def target_of(lowering: str) -> Target | None:
    """The target that writes graphs of a lowering; None for none that is installed."""
    return next((target for target in targets() if lowering in target.lowerings), None)


def chosen_targets(names: Sequence[str]) -> tuple[Target, ...]:
    """The targets of values of ``--target``, all but ``onnx``, in the order of the values.

    A target that is named is built or the build fails; ``auto`` takes those that are possible here.
    """
    found: dict[str, Target] = {}
    by_name = {target.name: target for target in targets() if target.name != ONNX}
    for name in names:
        if name == AUTO:
            found |= {each: target for each, target in by_name.items() if each not in found and target.is_possible()}
        elif name in by_name:
            found[name] = by_name[name]
    for name in names:
        if name in by_name:
            by_name[name].require()
    return tuple(found.values())


def graph_targets(chosen: Sequence[Target]) -> tuple[str, ...]:
    """Names of those that write graphs."""
    return tuple(target.name for target in chosen if target.variant is None)


def variants_of(chosen: Sequence[Target]) -> tuple[Backend, ...]:
    """Variants of those that build engines."""
    variants = tuple(target.variant for target in chosen if target.variant is not None)
    logger.info("engines to build: %s", ", ".join(variant.value for variant in variants) or "none")
    return variants


def targets_named(names: Sequence[str]) -> list[Target]:
    """The targets of these names."""
    return [target for target in targets() if target.name in names]
