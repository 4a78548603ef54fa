"""Common parts of runners of ONNX graphs: the choice of a graph, batches, and states in arrays."""

from __future__ import annotations

import abc
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hdplugins import OPERATORS
from hdruntime.arrays import Inputs, IntArray, Outputs
from hdruntime.backends.precision import BUILD_OPTIONS, Precision
from hdruntime.bundle.graph_interface import state_at_start
from hdruntime.bundle.manifest import GraphFile, Manifest
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendError, BackendUnavailableError, BundleCorruptError, OutOfMemoryError, Setting


class BundleRunner(abc.ABC):
    """Runs a bundle's graphs, by default each batch when its results are requested; see `hdruntime.backends.Runner`."""

    precision = Precision.AUTO

    max_in_flight = 1
    """A run waits for its results; a second one would only share the same cores or memory."""

    def __init__(self, bundle: Bundle) -> None:
        self.manifest = manifest = bundle.manifest
        self.mask, self.max_len = manifest.mask, manifest.max_len
        self._has_tokens_axis = {spec.name: spec.has_tokens_axis for spec in (*manifest.inputs, *manifest.outputs)}

    def max_rows(self, tokens: int) -> int:
        """Any number of rows; see :class:`hdruntime.backends.Runner`."""
        return sys.maxsize

    def computed_tokens(self, attention_mask: IntArray) -> int:
        """All tokens of the batch; see :class:`hdruntime.backends.Runner`."""
        return attention_mask.size

    def start(self, inputs: Inputs, outputs: Sequence[str]) -> Callable[[], Outputs]:
        """The run of a batch, which begins when its results are requested; see :class:`hdruntime.backends.Runner`."""
        return functools.partial(self.run, inputs, outputs)

    @abc.abstractmethod
    def run(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        """Run a batch; see :class:`hdruntime.backends.Runner`."""

    @abc.abstractmethod
    def run_bound(
        self, inputs: Inputs, outputs: Sequence[str], states: Mapping[str, Any], next_states: Mapping[str, Any]
    ) -> Outputs:
        """Run a batch as given, on recurrent states in the memory of the runner's device.

        Args:
            inputs: inputs other than recurrent states.
            states: name of an input -> value of the state, of the runner's type.
            next_states: name of an output -> value that the output is written to.
        """


def failed(library: str, message: object, batch: int, tokens: int) -> BackendError:
    """The error for a batch that a library cannot compute; `message` is the library's."""
    return BackendError(
        f"{library} failed on a batch of {batch} x {tokens} tokens: {message}",
        hint="Compare the bundle with its checkpoint (hdexport verify BUNDLE), or choose another backend.",
    )


def out_of_memory(library: str, message: object, batch: int, tokens: int) -> OutOfMemoryError:
    """The error for a batch that is too large for the free memory; `message` is the library's."""
    return OutOfMemoryError(
        f"{library} got no memory for a batch of {batch} x {tokens} tokens: {message}",
        hint=(
            ("Use smaller batches: lower ", Setting("batch_tokens"), ".")
            if batch > 1
            else "Free memory, or split the text into shorter texts."
        ),
    )


class HostStates:
    """The recurrent states of rows as arrays; see `hdruntime.backends.RecurrentStates`.

    A run reads one array of each state and writes another, and the two are swapped.
    """

    def __init__(self, runner: BundleRunner, rows: int) -> None:
        self._runner, manifest = runner, runner.manifest
        self._starts = {
            spec.name: state_at_start(spec, rows=1, memory=manifest.max_memory) for spec in manifest.recurrent_states
        }
        self._read = {name: np.repeat(start, rows, axis=0) for name, start in self._starts.items()}
        self._written = {name: np.empty_like(array) for name, array in self._read.items()}
        self._fed_from = {spec.name: str(spec.fed_from) for spec in manifest.recurrent_states}

    def run(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        """Run one segment of each row; see `hdruntime.backends.RecurrentStates.run`."""
        mask = inputs[self._runner.mask]
        if not mask.all():
            return self._run_rows(np.flatnonzero(mask.any(axis=1)), inputs, outputs)
        next_states = {self._fed_from[name]: array for name, array in self._written.items()}
        results = self._runner.run_bound(inputs, outputs, self._read, next_states)
        self._read, self._written = self._written, self._read
        return results

    def computed_tokens(self, attention_mask: IntArray) -> int:
        """Tokens of the rows that have real tokens; see `hdruntime.backends.RecurrentStates.computed_tokens`."""
        return self._runner.computed_tokens(attention_mask[attention_mask.any(axis=1)])

    def reset(self, rows: Sequence[int]) -> None:
        """Reset the states of rows; see `hdruntime.backends.RecurrentStates.reset`."""
        for name, start in self._starts.items():
            self._read[name][list(rows)] = start

    def _run_rows(self, rows: Any, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        """Run some rows, whose lengths may differ; the results of the other rows are 0."""
        selected = {name: array[rows] for name, array in (*inputs.items(), *self._read.items())}
        computed = self._runner.run(selected, list(dict.fromkeys((*outputs, *self._fed_from.values()))))
        for name, output in self._fed_from.items():
            self._read[name][rows] = computed[output]
        results = {}
        for name in outputs:
            results[name] = np.zeros((len(inputs[self._runner.mask]), *computed[name].shape[1:]), np.float32)
            results[name][rows] = computed[name]
        return results


def has_graph(bundle: Bundle, lowering: str, *, precision: Precision = Precision.AUTO) -> bool:
    """Whether a bundle has a graph of the lowering for the precision; see `chosen_graph`."""
    return any(graph.lowering == lowering for graph in _of_precision(bundle, precision))


def needs_float32(manifest: Manifest) -> bool:
    """Whether a bundle must not be computed in half precision: its operators count tokens in floats, and by rounded
    counts other tokens attend to each other."""
    return any(name in OPERATORS and OPERATORS[name].counts_in_floats for name in manifest.operator_names)


def chosen_graph(
    bundle: Bundle, lowerings: Sequence[str], *, where: str, precision: Precision = Precision.AUTO
) -> GraphFile:
    """The bundle's graph of the first of these lowerings that it has; `where` is the device that runs it, for the
    message. A precision without graphs of its own takes every bundle's graph."""
    by_lowering = {graph.lowering: graph for graph in _of_precision(bundle, precision)}
    for lowering in lowerings:
        if lowering in by_lowering:
            return by_lowering[lowering]
    if precision.has_graphs:
        raise BackendUnavailableError(
            f"The bundle has no graph in {precision} that {where} can run.",
            hint=("Build it again with ", BUILD_OPTIONS[precision], ", or leave out the precision."),
        )
    raise BundleCorruptError(f"The bundle {bundle.path} has no ONNX graph that {where} can run.", hint="Rebuild it.")


def _of_precision(bundle: Bundle, precision: Precision) -> list[GraphFile]:
    others = set(BUILD_OPTIONS)
    return [
        graph
        for graph in bundle.manifest.graphs
        if (graph.dtype == precision if precision.has_graphs else graph.dtype not in others)
    ]
