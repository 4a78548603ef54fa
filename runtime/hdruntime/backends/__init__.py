"""Backends, which run a bundle's graph or engine. Each backend is a folder, imported when the backend is chosen."""

from __future__ import annotations

__all__ = ["DeviceRunner", "RecurrentStates", "Runner"]

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from hdruntime.backends.precision import Precision

if TYPE_CHECKING:
    # The command line names precisions, and starts without NumPy and without the manifest's classes.
    from hdruntime.arrays import AnyArray, FloatArray, IntArray
    from hdruntime.bundle.manifest import Backend
    from hdruntime.gpu.device_arrays import DeviceArray


class RecurrentStates(Protocol):
    """The recurrent states of rows, in the memory of the runner's device; a state of tokens has its full size.

    For one thread at a time. The states are freed with the last reference.
    """

    def run(self, inputs: Mapping[str, AnyArray], outputs: Sequence[str]) -> dict[str, FloatArray]:
        """Run one segment of each row and replace the states. After a failed run, the states cannot be used.

        `inputs` are the manifest's inputs except recurrent states, checked. A row without real tokens is not computed,
        or its results have no meaning. Otherwise as :meth:`Runner.start`.
        """

    def computed_tokens(self, attention_mask: IntArray) -> int:
        """Number of tokens computed for segments with this mask, int64 [batch, tokens], including padding."""

    def reset(self, rows: Sequence[int]) -> None:
        """Set the states of rows to the manifest's defaults, for a new document."""


class Runner(Protocol):
    """A graph or engine, loaded and ready. Safe to use from several threads, :meth:`close` included.

    Attributes:
        backend: the backend of this runner.
        precision: precision of the computation; ``auto`` on a GPU, where the graph or the engine decides.
        batch_tokens: tokens of a batch, including padding, beyond which throughput no longer grows.
        max_in_flight: number of batches that one caller keeps in flight, so that a batch is copied while another is
            computed. Several callers together may start more: the runner then finishes the oldest batch to make room,
            and never waits for a caller.
        max_len: maximum number of tokens of a row; an engine's profiles may accept fewer than the manifest.
    """

    backend: Backend
    precision: Precision
    batch_tokens: int
    max_in_flight: int
    max_len: int

    def max_padding(self, tokens: int) -> int:
        """Maximum tokens of padding in a batch padded to this many tokens; ``sys.maxsize`` without a limit. Rows that
        need more run faster in another batch."""

    def max_rows(self, tokens: int) -> int:
        """Maximum number of rows of a batch padded to this many tokens; ``sys.maxsize`` without a limit."""

    def computed_tokens(self, attention_mask: IntArray) -> int:
        """Number of tokens computed for a batch with this mask, int64 [batch, tokens], including padding."""

    def start(self, inputs: Mapping[str, AnyArray], outputs: Sequence[str]) -> Callable[[], dict[str, FloatArray]]:
        """Begin a batch, and return a function that waits for its results.

        Every caller calls that function once for each batch, in the order of its starts. It gives name -> float32 array
        of the shape in the manifest, owned by the caller; padded positions of a tokens axis hold 0.

        Args:
            inputs: every input of the manifest, checked, of its type and shape; unchanged until the results arrive.

        Raises:
            BackendError: the backend failed, or is closed. Raised here or by the returned function.
            OutOfMemoryError: memory is too small for this batch; a smaller one may fit. Likewise.
        """

    def open_states(self, rows: int) -> RecurrentStates:
        """The recurrent states of this many rows, with the manifest's defaults."""

    def close(self) -> None:
        """Free memory; later starts, and requests for results, raise BackendError. May be repeated."""


@runtime_checkable
class DeviceRunner(Runner, Protocol):
    """A runner that accepts and returns arrays in GPU memory."""

    def engine_bytes(self) -> int | None:
        """GPU memory that the engine reports: its weights, and the scratch memory of its contexts, without inputs,
        outputs and the driver's memory. None if the engine does not report it."""

    def start_on_device(self, inputs: Mapping[str, object], outputs: Sequence[str]) -> dict[str, DeviceArray]:
        """Begin a batch whose inputs are on the GPU and leave its results there; see `Session.run_on_device`."""
