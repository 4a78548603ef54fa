"""Backends: what runs a bundle's graph or engine, one file each, loaded when chosen."""

from __future__ import annotations

__all__ = ["DeviceRunner", "Runner"]

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from hdruntime.bundle.manifest import Backend

if TYPE_CHECKING:
    from hdruntime.gpu.device_arrays import DeviceArray


class Runner(Protocol):
    """A graph or engine, loaded and ready. Safe to use from several threads, :meth:`close` included.

    Attributes:
        backend: which one this is.
        prefers_equal_lengths: batches without any padding run faster than padded ones of the same size.
        batch_tokens: tokens of a batch, padding included, beyond which throughput gains nothing.
        most_in_flight: batches that one caller has under way at a time, so that one is copied while another is
            computed. Several callers may together start more: the runner then finishes the oldest to make room, and
            never waits for a caller.
        max_len: most tokens of a row; an engine's profiles may serve fewer than the manifest says.
    """

    backend: Backend
    prefers_equal_lengths: bool
    batch_tokens: int
    most_in_flight: int
    max_len: int

    def most_rows(self, tokens: int) -> int:
        """Rows that a batch padded to so many tokens may have; ``sys.maxsize`` where nothing limits them."""

    def computed_tokens(self, attention_mask: npt.NDArray[np.int64]) -> int:
        """Tokens that a batch with this mask, int64 [batch, tokens], is computed with: its own, and all padding."""

    def start(
        self, inputs: Mapping[str, npt.NDArray[Any]], outputs: Sequence[str]
    ) -> Callable[[], dict[str, npt.NDArray[np.float32]]]:
        """Begin a batch.

        Args:
            inputs: every input of the manifest, checked, of its type and shape, unchanged until the results are there.
            outputs: names of the outputs wanted.

        Returns:
            what waits for the results and gives them. Every caller calls it once for each batch, in the order in which
            it started them. Name -> float32 array of the shape in the manifest, the caller's own; padded positions of
            a tokens axis hold 0.

        Raises:
            BackendError: the backend failed, or is closed. Raised here or by what is returned.
            OutOfMemoryError: memory was short, and a smaller batch may fit. Likewise.
        """

    def close(self) -> None:
        """Free memory. What is started, or asked for its results, afterwards raises BackendError. May be repeated."""


@runtime_checkable
class DeviceRunner(Runner, Protocol):
    """A runner that takes and gives arrays in the memory of a GPU."""

    def engine_bytes(self) -> int | None:
        """What the engine says that it takes on the GPU now: its weights, and the scratch memory of its contexts.

        Inputs, outputs and what the driver keeps come on top. None where it does not say.

        Raises:
            BackendError: the runner is closed.
        """

    def start_on_device(self, inputs: Mapping[str, object], outputs: Sequence[str]) -> dict[str, DeviceArray]:
        """Begin a batch whose inputs are on the GPU and whose results stay there; see `Session.run_on_device`."""
