"""Which of a bundle's graphs a backend runs."""

from __future__ import annotations

__all__ = ["chosen_graph", "has_graph"]

from collections.abc import Sequence
from typing import Literal

from hdruntime.bundle.manifest import GraphFile
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendUnavailableError, BundleCorruptError


def has_graph(bundle: Bundle, lowering: str, *, dtype: Literal["int8"] | None = None) -> bool:
    """Whether a bundle has a graph of that lowering, and of that dtype as of `chosen_graph`."""
    return any(graph.lowering == lowering for graph in _of_dtype(bundle, dtype))


def chosen_graph(
    bundle: Bundle, lowerings: Sequence[str], *, where: str, dtype: Literal["int8"] | None = None
) -> GraphFile:
    """The bundle's graph of the first lowering that it has.

    Args:
        bundle: an opened bundle.
        lowerings: best first.
        where: the device that runs it, for the message.
        dtype: ``int8`` for the graph of that name, None for the one that every bundle has.

    Raises:
        BundleCorruptError: the bundle has no such graph.
        BackendUnavailableError: it has none in int8.
    """
    by_lowering = {graph.lowering: graph for graph in _of_dtype(bundle, dtype)}
    for lowering in lowerings:
        if lowering in by_lowering:
            return by_lowering[lowering]
    if dtype is not None:
        raise BackendUnavailableError(
            f"The bundle {bundle.path} has no graph in {dtype} that {where} can run.\n"
            f"Build it again with --{dtype}, or leave out the precision."
        )
    raise BundleCorruptError(f"The bundle {bundle.path} has no ONNX graph that {where} can run.\nRebuild it.")


def _of_dtype(bundle: Bundle, dtype: Literal["int8"] | None) -> list[GraphFile]:
    return [graph for graph in bundle.manifest.graphs if (graph.dtype == "int8") == (dtype == "int8")]
