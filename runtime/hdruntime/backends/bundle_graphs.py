"""The choice of a bundle's graph for a backend."""

from __future__ import annotations

from collections.abc import Sequence

from hdruntime.backends.precision import OPTION_OF_GRAPHS, Precision
from hdruntime.bundle.manifest import GraphFile
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendUnavailableError, BundleCorruptError


def has_graph(bundle: Bundle, lowering: str, *, precision: Precision = Precision.AUTO) -> bool:
    """Whether a bundle has a graph of that lowering that computes in a precision, as of `chosen_graph`."""
    return any(graph.lowering == lowering for graph in _of_precision(bundle, precision))


def chosen_graph(
    bundle: Bundle, lowerings: Sequence[str], *, where: str, precision: Precision = Precision.AUTO
) -> GraphFile:
    """The bundle's graph of the first of these lowerings that it has; `where` is the device that runs it, for the
    message.

    A precision without graphs of its own takes every bundle's graph.

    Raises:
        BundleCorruptError: the bundle has no such graph.
        BackendUnavailableError: the bundle has no graph of the precision's own.
    """
    by_lowering = {graph.lowering: graph for graph in _of_precision(bundle, precision)}
    for lowering in lowerings:
        if lowering in by_lowering:
            return by_lowering[lowering]
    if precision.has_graphs:
        raise BackendUnavailableError(
            f"The bundle {bundle.path} has no graph in {precision.value} that {where} can run.\n"
            f"Build it again with {OPTION_OF_GRAPHS[precision]}, or leave out the precision."
        )
    raise BundleCorruptError(f"The bundle {bundle.path} has no ONNX graph that {where} can run.\nRebuild it.")


def _of_precision(bundle: Bundle, precision: Precision) -> list[GraphFile]:
    others = {each.value for each in OPTION_OF_GRAPHS}
    return [
        graph
        for graph in bundle.manifest.graphs
        if (graph.dtype == precision.value if precision.has_graphs else graph.dtype not in others)
    ]
