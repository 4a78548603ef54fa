"""Carried states in arrays: outputs of a run become inputs of the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hdruntime.arrays import IntArray
from hdruntime.backends.bundle_runner import BundleRunner, Inputs, Outputs
from hdruntime.bundle.graph_interface import state_at_start


class HostStates:
    """The carried states of some rows as arrays; see `hdruntime.backends.CarriedStates`. A run reads one array of each
    state and writes another, and the two are swapped."""

    def __init__(self, runner: BundleRunner, rows: int) -> None:
        self._runner, manifest = runner, runner.manifest
        self._starts = {
            spec.name: state_at_start(spec, rows=1, memory=manifest.most_memory) for spec in manifest.memories
        }
        self._read = {name: np.repeat(start, rows, axis=0) for name, start in self._starts.items()}
        self._written = {name: np.empty_like(array) for name, array in self._read.items()}
        self._fed_from = {spec.name: str(spec.fed_from) for spec in manifest.memories}

    def run(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        """Run one segment of each row; see `hdruntime.backends.CarriedStates.run`."""
        mask = inputs[self._runner.mask]
        if not mask.all():
            return self._run_rows(np.flatnonzero(mask.any(axis=1)), inputs, outputs)
        left = {self._fed_from[name]: array for name, array in self._written.items()}
        results = self._runner.run_bound(inputs, outputs, self._read, left)
        self._read, self._written = self._written, self._read
        return results

    def computed_tokens(self, attention_mask: IntArray) -> int:
        """Without rows of padding alone; see `hdruntime.backends.CarriedStates.computed_tokens`."""
        return self._runner.computed_tokens(attention_mask[attention_mask.any(axis=1)])

    def reset(self, rows: Sequence[int]) -> None:
        """Forget what rows carry; see `hdruntime.backends.CarriedStates.reset`."""
        for name, start in self._starts.items():
            self._read[name][list(rows)] = start

    def _run_rows(self, rows: Any, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        """Run some rows, whose lengths may differ; the others' results are 0."""
        given = {name: array[rows] for name, array in (*inputs.items(), *self._read.items())}
        found = self._runner.run(given, list(dict.fromkeys((*outputs, *self._fed_from.values()))))
        for name, output in self._fed_from.items():
            self._read[name][rows] = found[output]
        results = {}
        for name in outputs:
            results[name] = np.zeros((len(inputs[self._runner.mask]), *found[name].shape[1:]), np.float32)
            results[name][rows] = found[name]
        return results
