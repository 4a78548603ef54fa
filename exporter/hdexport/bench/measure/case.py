"""The model that a benchmark is about, and one case: the input of its process, and its figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hdexport.bench.results.result import OutputError, PeakMemory
from hdexport.checkpoint.trust import UNTRUSTED, Trust
from hdruntime.backends.precision import Precision


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """One PyTorch model; bundles of other precisions and backends may share it.

    Attributes:
        bundle: says which task, positions and attention the model has; of several the one that takes the longest texts.
        checkpoint: the bundle's: a directory, or ``organisation/name`` on the Hugging Face hub; None
            where it is not here: then PyTorch's answers and the peers are left out.
        trust: which code of the checkpoint may run.
    """

    bundle: Path
    checkpoint: str | None
    trust: Trust = UNTRUSTED


@dataclass(frozen=True, kw_only=True)
class CaseSpec:
    """The description of a case, for its process.

    Attributes:
        runner: a backend of the runtime or a peer, as in `Series.runner`.
        bundle: the bundle that is run, or whose model a peer runs.
        artefact: the folder or file that the peer's preparation made; None for backends, which have none.
        inputs: an ``.npz`` of the inputs of the bundle's manifest, int64 [batch, tokens] each.
        expected: a folder of PyTorch's outputs in float32, a ``.npy`` file each; None measures without comparing.
        device: ``cpu`` or ``cuda``.
        precision: the precision that a bundle is asked to compute in, as for `hdruntime.load`; peers have their own.
        threads: CPU threads.
        least_runs: timed at least.
        least_seconds: the timed runs together take at least that; 0 is a probe of memory, which is not warmed up.
    """

    runner: str
    bundle: Path
    inputs: Path
    artefact: Path | None = None
    expected: Path | None = None
    device: str = "cpu"
    precision: Precision = Precision.AUTO
    threads: int = 1
    least_runs: int = 1
    least_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CaseFigures:
    """The figures of one process.

    Attributes:
        latencies_ms: of each timed run, in order.
        is_stable: whether the warm-up ended because the latency no longer changed.
        memory: its peaks.
        precision: the precision that it computed in; ``auto`` on a GPU.
        error: None where nothing was compared.
    """

    latencies_ms: tuple[float, ...]
    is_stable: bool
    memory: PeakMemory
    error: OutputError | None
    precision: Precision = Precision.AUTO
