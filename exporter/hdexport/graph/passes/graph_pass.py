"""Run graph passes in order."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import onnx_ir as ir

logger = logging.getLogger(__name__)


def run_passes(model: ir.Model, passes: Iterable[ir.passes.PassBase]) -> bool:
    """Run in-place passes on a model, in order; returns whether any of them changed it.

    `ir.passes.Sequential` of onnx_ir 1.1.0 runs them as well, but hides an ExportError in a PassError.
    """
    modified = False
    for graph_pass in passes:
        changed = graph_pass(model).modified
        logger.debug("pass %s %s", type(graph_pass).__name__, "changed the graph" if changed else "changed nothing")
        modified |= changed
    return modified
