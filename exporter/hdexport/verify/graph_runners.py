"""A bundle's graphs and engines on this machine, to be compared with PyTorch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import hdruntime
from hdexport.graph.bundle_graph import read_graph
from hdexport.graph.left_out_layers import LayerResults, layer_results
from hdexport.graph.targets.target import Changes
from hdexport.verify.graph_sets import GraphSet
from hdruntime.arrays import FloatArray, IntArray
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendError, BundleError, HdexportError

if TYPE_CHECKING:
    from hdexport.graph.targets.target import Run


@contextlib.contextmanager
def runner(bundle: Bundle, graphs: GraphSet, changes: Changes) -> Iterator[Run | None]:
    """Run graphs: lowered ones and engines as users do, through the runtime; changed ones and the portable one alone.

    None is yielded where the changes are not possible: on a GPU, or where a graph's last projection is not found.

    What cannot be loaded on a GPU raises its error in every run, so that each case has a reason.
    """
    if not graphs.is_on_gpu:
        if changes:
            yield graphs.target.changed_run(bundle, graphs.graphs, graphs.precision, changes)
            return
        with graphs.target.running(bundle, graphs.graphs, graphs.precision) as run:
            yield run
        return
    if changes.is_sampled:
        yield None
        return
    try:
        session = hdruntime.load(graphs.alone(bundle), graphs.backend)
    except (BackendError, BundleError) as error:
        yield functools.partial(_refused, error)
        return
    with session:
        yield lambda feeds: session(**feeds)


def _refused(error: HdexportError, feeds: Mapping[str, IntArray]) -> dict[str, FloatArray]:
    raise error


def repeated_layers(bundle: Bundle, sets: Sequence[GraphSet]) -> LayerResults | None:
    """The layer results of a bundle's graphs; None where no layer repeats another, or a graph has lost the names."""
    found = layer_results(read_graph(bundle, bundle.manifest.graphs[0]))
    if found is None or not all(each.target.leaves_out(bundle, each.graphs, found) for each in sets):
        return None
    return found
