"""The interface of a target (``--target``) for builds, rebuilds and verifications."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import hdruntime
from hdruntime.backends.entry import BackendEntry
from hdruntime.backends.precision import BUILD_OPTIONS, Precision
from hdruntime.backends.registry import backend_named
from hdruntime.bundle.manifest import Backend, Dtype, GraphFile, Manifest
from hdruntime.bundle.verification import Skip, SkipCause
from hdruntime.errors import MissingDependencyError

if TYPE_CHECKING:
    import onnx_ir

    from hdexport.attention.attention_type import DiscreteOutputs
    from hdruntime.arrays import FloatArray, IntArray
    from hdruntime.bundle.reader import Bundle

    Run = Callable[[Mapping[str, IntArray]], dict[str, FloatArray]]
    """Inputs by name, all of the graph's -> outputs by name."""


class GraphRequest(NamedTuple):
    """Options of the graphs that a target writes.

    Attributes:
        dtype: dtype of the portable graph.
        layers: number of the model's layers.
        ffn_chunk: maximum number of tokens that a feed-forward network computes at once, where the target computes it
            in chunks; None for all tokens.
    """

    dtype: Dtype
    layers: int
    ffn_chunk: int | None = None


class Changes(NamedTuple):
    """Changes of a verification to graphs before the graphs run.

    Attributes:
        discrete_outputs: choices of the graphs that become further outputs; None for none.
        is_sampled: whether logits are computed at a few tokens, which the graphs take as the input `SAMPLED_TOKENS`,
            [samples].
    """

    discrete_outputs: DiscreteOutputs | None = None
    is_sampled: bool = False

    def __bool__(self) -> bool:
        return self.is_sampled or self.discrete_outputs is not None


class Target:
    """What the exporter writes into a bundle for a backend, and how that is verified.

    A target is a folder beside this file, whose module `target` lists its instances in `TARGETS`.
    """

    name: ClassVar[str]
    """The value of ``--target``."""

    help: ClassVar[str]
    """What the target adds to a bundle, for the help of ``--target``."""

    backend: ClassVar[Backend]
    """The backend that runs the target's graphs or engines, and verifies them."""

    # Graphs.

    lowerings: ClassVar[tuple[str, ...]] = ()
    """Lowerings (`GraphFile.lowering`) of the graphs that the target writes; () for a target of engines."""

    title: ClassVar[str] = ""
    """Name of the backend in the title of a build's step."""

    rounded: ClassVar[tuple[str, ...]] = ()
    """Lowerings of the graphs from which ``--int8`` makes int8 graphs."""

    fuses_masks: ClassVar[bool] = False
    """Whether fused attention keeps no attention scores in memory, even where a mask is applied."""

    @property
    def entry(self) -> BackendEntry:
        """The backend in the runtime."""
        entry = backend_named(self.backend)
        assert entry is not None
        return entry

    def require(self) -> None:
        """Raise an error if the target cannot be built or verified on this machine; for a target that was named."""
        if not self.entry.is_installed():
            raise MissingDependencyError(
                f"{self.entry.library} is not installed.", hint=f"Install it with: {self.entry.install}"
            )

    def is_possible(self) -> bool:
        """Whether ``auto`` takes the target on this machine; no large package is imported."""
        return self.entry.is_installed()

    def write(self, portable: onnx_ir.Model, directory: Path, request: GraphRequest) -> list[GraphFile]:
        """Write the target's graphs into a bundle's directory. The graphs share the weights of the portable graph."""
        return []

    runs_parts: ClassVar[bool] = False
    """Whether `run_of` runs parts of graphs, where memory does not hold the weights of a whole graph."""

    # Engines.

    variant: ClassVar[Backend | None] = None
    """TensorRT variant of the engines that the target builds; None for a target of graphs."""

    # Verification.

    def sets(self, graphs: Sequence[GraphFile]) -> Iterator[tuple[GraphFile, ...]]:
        """Yield the target's graphs that run on a CPU, grouped by session; the graph for any batch is first."""
        for graph in graphs:
            if graph.lowering in self.lowerings:
                yield (graph,)

    def precisions(self, graph: GraphFile) -> tuple[Precision, ...]:
        own = tuple(precision for precision in BUILD_OPTIONS if graph.dtype == precision)
        return own or (Precision.FLOAT32,)

    def verification_skip(self, graph: GraphFile, precision: Precision, manifest: Manifest) -> Skip | None:
        """Why a graph is not compared on this machine in a precision, or None."""
        if self.entry.is_installed():
            return None
        return Skip(cause=SkipCause.NOT_INSTALLED, detail=f"`{self.entry.install}`")

    def weight_bytes(self, bundle: Bundle, precision: Precision) -> int:
        """Memory of the weights of a session on the CPU, in bytes."""
        return 4 * bundle.manifest.parameters

    @contextlib.contextmanager
    def running(self, bundle: Bundle, graphs: tuple[GraphFile, ...], precision: Precision) -> Iterator[Run]:
        """Run graphs through the runtime, as users do."""
        with hdruntime.load(bundle, self.backend, precision=precision) as session:
            yield lambda feeds: session(**feeds)

    def runs_padding(self, graph: GraphFile) -> bool:
        """Whether `running` runs batches of a graph with their padding, which the runtime would remove."""
        return False

    def graph_of(self, manifest: Manifest, graphs: tuple[GraphFile, ...], feeds: Mapping[str, IntArray]) -> GraphFile:
        """The graph that the runtime runs for a batch, after it has removed padding."""
        return graphs[0]

    def run_of(self, path: Path, graph: GraphFile, precision: Precision) -> Run:
        """Open a part of a graph, whose weights are in files beside it, to run batches as given."""
        raise NotImplementedError

    def changed_run(
        self, bundle: Bundle, graphs: tuple[GraphFile, ...], precision: Precision, changes: Changes
    ) -> Run | None:
        """Run changed graphs with padding, which the runtime would remove; None where the target cannot."""
        return None
