"""Common parts of runners of ONNX graphs."""

from __future__ import annotations

import abc
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hdruntime.arrays import AnyArray, FloatArray, IntArray
from hdruntime.backends.precision import Precision
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import OutOfMemoryError

Inputs = Mapping[str, AnyArray]
Outputs = dict[str, FloatArray]


class BundleRunner(abc.ABC):
    """Runs a bundle's graphs, each batch when its results are requested; see `hdruntime.backends.Runner`."""

    precision = Precision.AUTO

    most_in_flight = 1
    """A run waits for its results; a second one would only share the same cores or memory."""

    def __init__(self, bundle: Bundle) -> None:
        self.manifest = manifest = bundle.manifest
        self.mask, self.max_len = manifest.mask, manifest.max_len
        self._has_tokens_axis = {spec.name: spec.has_tokens_axis for spec in (*manifest.inputs, *manifest.outputs)}

    def most_rows(self, tokens: int) -> int:
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
        self, inputs: Inputs, outputs: Sequence[str], carried: Mapping[str, Any], left: Mapping[str, Any]
    ) -> Outputs:
        """Run a batch as given, on carried states that stay where the runner computes.

        `inputs` are without them; `carried` has the value of each by the input's name, of the runner's own type; `left`
        has, by the name of an output, the value that it is written to.
        """


def out_of_memory(library: str, said: object, batch: int, tokens: int) -> OutOfMemoryError:
    """The error for a batch that a library got no memory for."""
    advice = (
        "Use smaller batches: hdexport run --batch-tokens, in Python batch_tokens."
        if batch > 1
        else "Free memory, or cut the text into shorter ones."
    )
    return OutOfMemoryError(f"{library} got no memory for a batch of {batch} x {tokens} tokens: {said}\n{advice}")
