"""What a target of ``--target`` says of itself. Builds, rebuilds and verifications ask this and name none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

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
    """What graphs are written for: the portable graph's dtype, the model's layers, and the most tokens that a
    feed-forward network computes at once, where a target computes it in chunks; None for all."""

    dtype: Dtype
    layers: int
    ffn_chunk: int | None = None


class Changes(NamedTuple):
    """What a verification changes in graphs before it runs them.

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
    """The exporter's side of a backend: what it writes into a bundle, and how that is verified.

    A target is a folder beside this file, whose module `target` lists its instances in `TARGETS`.
    """

    name: ClassVar[str]
    """The value of ``--target``."""

    help: ClassVar[str]
    """What it adds to a bundle, as a part of a sentence."""

    backend: ClassVar[Backend]
    """Which runs what it makes, and by which that is verified."""

    # Graphs.

    lowerings: ClassVar[tuple[str, ...]] = ()
    """Of the graphs that it writes, as `GraphFile.lowering` names them; () where it builds engines."""

    title: ClassVar[str] = ""
    """Whom a step of the build is for."""

    rounded: ClassVar[tuple[str, ...]] = ()
    """Of the graphs that ``--int8`` makes int8 graphs of."""

    fuses_masks: ClassVar[bool] = False
    """Whether attention that it fuses has no scores in memory, even where a text is masked."""

    @property
    def entry(self) -> BackendEntry:
        """The runtime's side of the backend."""
        entry = backend_named(self.backend)
        assert entry is not None
        return entry

    def require(self) -> None:
        """Refuse a target that was named and cannot be built on this machine, or not verified."""
        if not self.entry.is_installed():
            raise MissingDependencyError(
                f"{self.entry.library} is not installed here.", hint=f"Install it with: {self.entry.install}"
            )

    def is_possible(self) -> bool:
        """Whether ``auto`` takes it on this machine; nothing heavy is imported."""
        return self.entry.is_installed()

    def write(self, portable: onnx_ir.Model, directory: Path, request: GraphRequest) -> list[GraphFile]:
        """Write its graphs into a bundle's directory; they share the weights of the portable graph, which stays as it
        is."""
        return []

    # Engines.

    variant: ClassVar[Backend | None] = None
    """Of the engines that it builds; None where it writes graphs."""

    # Verification.

    def sets(self, graphs: Sequence[GraphFile]) -> Iterator[tuple[GraphFile, ...]]:
        """Of all graphs of a bundle, its own that run on a CPU, by those that one session runs; that for any batch
        first."""
        for graph in graphs:
            if graph.lowering in self.lowerings:
                yield (graph,)

    def precisions(self, graph: GraphFile) -> tuple[Precision, ...]:
        """The precisions that a graph is verified in."""
        own = tuple(precision for precision in BUILD_OPTIONS if graph.dtype == precision)
        return own or (Precision.FLOAT32,)

    def verification_skip(self, graph: GraphFile, precision: Precision, manifest: Manifest) -> Skip | None:
        """Why a graph is not compared on this machine in a precision, or None."""
        if self.entry.is_installed():
            return None
        return Skip(cause=SkipCause.NOT_INSTALLED, detail=f"`{self.entry.install}`")

    @contextlib.contextmanager
    def running(self, bundle: Bundle, graphs: tuple[GraphFile, ...], precision: Precision) -> Iterator[Run]:
        """Run graphs as users do, through the runtime."""
        import hdruntime

        with hdruntime.load(bundle, self.backend, precision=precision) as session:
            yield lambda feeds: session(**feeds)

    def changed_run(
        self, bundle: Bundle, graphs: tuple[GraphFile, ...], precision: Precision, changes: Changes
    ) -> Run | None:
        """Run changed graphs; None where that cannot be. Padding is not cut off as the runtime does."""
        return None
