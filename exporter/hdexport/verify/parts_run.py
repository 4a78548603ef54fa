"""Run graphs part by part, where memory does not hold a session's weights: every batch in one part before the next."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import hdruntime
from hdexport.graph.bundle_graph import read_graph
from hdexport.graph.targets.target import Changes
from hdexport.graph.vocabulary_head import sampled_graph
from hdexport.support.progress import Progress
from hdexport.verify.graph_sets import GraphSet, Opened
from hdexport.verify.temporary_outputs import temporary_outputs
from hdruntime.arrays import AnyArray, Inputs, Outputs
from hdruntime.backends.cpu_runner import CpuRunner, give_memory_back
from hdruntime.bundle.manifest import GraphFile
from hdruntime.bundle.reader import Bundle

if TYPE_CHECKING:
    from hdexport.graph.parts import Part
    from hdexport.graph.targets.target import Run


@contextlib.contextmanager
def opened_in_parts(
    bundle: Bundle,
    graphs: GraphSet,
    changes: Changes,
    batches: Callable[[], Iterable[Mapping[str, AnyArray]]],
    progress: Progress,
) -> Iterator[Opened]:
    """Run batches in parts of graphs, which have weights of `GraphSet.part_bytes` or less in a session.

    The run that is yielded gives the results of these batches, and of no others. Values between parts wait on the disk.
    Batches run as `hdexport.verify.graph_sets.opened` runs them, by the runtime's rules for padding. Decisions of
    graphs are not watched.
    """
    from hdexport.graph.parts import cut

    assert changes.discrete_outputs is None
    assert graphs.part_bytes is not None
    target, manifest = graphs.target, bundle.manifest
    max_weights = graphs.part_bytes * manifest.parameters // target.weight_bytes(bundle, graphs.precision)
    parts: dict[str, list[Part]] = {}
    for graph in graphs.graphs:
        model = read_graph(bundle, graph)
        if changes.is_sampled and not sampled_graph(model, manifest.outputs[0].name, manifest.vocab_size):
            yield Opened(None)
            return
        parts[graph.file] = cut(model, max_weights)
        names = [str(value.name) for value in model.graph.outputs]
    with temporary_outputs("hdexport-parts-") as directory:
        runner = _PartsRunner(bundle, graphs, directory, keeps_padding=bool(changes))
        steps = [(graph, part) for graph in graphs.graphs for part in parts[graph.file]]
        for number, (graph, part) in enumerate(steps):
            progress.detail("parts of graphs", number, len(steps))
            with runner.loaded(graph, part):
                for batch in batches():
                    runner.run(batch, ())
        most = max(map(len, parts.values()))
        if runner.keeps_padding:
            yield Opened(lambda feeds: runner.run(feeds, names), most)
        else:
            with hdruntime.Session(bundle, runner) as session:
                yield Opened(lambda feeds: session(**feeds), most)


class _Loaded(NamedTuple):
    """A part of a graph that is in memory."""

    graph: GraphFile
    part: Part
    run: Run


class _PartsRunner(CpuRunner):
    """Runs batches in the part that is loaded, if it is of their graph, or reads what all parts computed.

    Args:
        directory: of the values that parts computed, in a folder for each batch.
        keeps_padding: whether changed graphs run, which take padding.
    """

    batch_tokens = 1

    def __init__(self, bundle: Bundle, graphs: GraphSet, directory: Path, *, keeps_padding: bool) -> None:
        super().__init__(bundle)
        self.backend, self.precision = graphs.backend, graphs.precision
        self.keeps_padding = keeps_padding or graphs.target.runs_padding(graphs.graphs[0])
        self._graphs, self._directory = graphs, directory
        self._loaded: _Loaded | None = None
        self._numbers: dict[str, int] = {}
        self._errors: dict[str, Exception] = {}

    @contextlib.contextmanager
    def loaded(self, graph: GraphFile, part: Part) -> Iterator[None]:
        """Load a part of a graph in the context, and delete the values that no later part reads."""
        import onnx_ir as ir

        # A copy of the weights, because OpenVINO wants them in the directory of the graph.
        with tempfile.TemporaryDirectory(dir=self._directory) as directory:
            path = Path(directory) / "part.onnx"
            ir.save(part.model, path, external_data="weights")
            run = self._graphs.target.run_of(path, graph, self._graphs.precision)
            self._loaded = _Loaded(graph, part, run)
            del run
            try:
                yield
            finally:
                self._loaded = None
                give_memory_back()
        for name in part.ended:
            for values in self._directory.glob(f"*/{self._number(name)}.npy"):
                values.unlink()

    def run(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        """Run a batch in the part that is loaded, or give its results; see :class:`hdruntime.backends.Runner`."""
        return self._run_as_given(inputs, outputs) if self.keeps_padding else super().run(inputs, outputs)

    def close(self) -> None:
        """Nothing is left to free; see :class:`hdruntime.backends.Runner`."""

    def _run_as_given(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        folder = self._directory / _digest(inputs)
        if self._loaded is None:
            if folder.name in self._errors:
                raise self._errors[folder.name]
            return {name: np.load(self._file(folder, name)) for name in outputs}
        graph, part, run = self._loaded
        if (
            graph != self._graphs.target.graph_of(self.manifest, self._graphs.graphs, inputs)
            or folder.name in self._errors
        ):
            return {}
        names = [str(value.name) for value in part.model.graph.inputs]
        feeds = {name: inputs[name] if name in inputs else np.load(self._file(folder, name)) for name in names}
        try:
            results = run(feeds)
        except MemoryError:
            raise
        except Exception as error:
            # Of this batch alone, whose results are asked for later.
            self._errors[folder.name] = error
            return {}
        folder.mkdir(exist_ok=True)
        for value in part.model.graph.outputs:
            np.save(self._file(folder, str(value.name)), results[str(value.name)])
        return {}

    def _file(self, folder: Path, name: str) -> Path:
        return folder / f"{self._number(name)}.npy"

    def _number(self, name: str) -> int:
        # Names of values are not names of files.
        return self._numbers.setdefault(name, len(self._numbers))


def _digest(inputs: Inputs) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(inputs):
        digest.update(f"{name} {inputs[name].dtype} {inputs[name].shape} ".encode())
        digest.update(np.ascontiguousarray(inputs[name]).tobytes())
    return digest.hexdigest()
