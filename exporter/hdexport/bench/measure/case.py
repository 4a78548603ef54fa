"""The model that a benchmark is about, and one case: the input of its process, and its figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hdexport.bench.results.result import OutputError, PeakMemory
from hdexport.checkpoint.trust import UNTRUSTED, Trust
from hdruntime.backends.precision import Precision


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """One PyTorch model; bundles of other precisions and backends may share it.

    Attributes:
        bundle: gives the task, positions and attention; of several bundles the one with the longest texts.
        checkpoint: a directory, or ``organisation/name`` on the Hugging Face hub; None where it is not here, which
            leaves out PyTorch's answers and the peers.
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
        artefact: the folder or file that the peer prepared; None for backends.
        inputs: an ``.npz`` of the inputs of the bundle's manifest, int64 [batch, tokens] each.
        expected: a folder of PyTorch's outputs in float32, one ``.npy`` file each; None measures without comparing.
        device: ``cpu`` or ``cuda``.
        precision: the precision that a bundle is asked to compute in; peers have their own.
        least_seconds: least duration of the timed runs together; 0 is a probe of memory, which is not warmed up.
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


class CaseFigures(NamedTuple):
    """The figures of one process.

    Attributes:
        latencies_ms: of each timed run, in order.
        is_stable: whether the latency no longer changed at the end of the warm-up.
        memory: its peaks.
        error: None where nothing was compared.
        precision: the precision that it computed in; ``auto`` on a GPU.
    """

    latencies_ms: tuple[float, ...]
    is_stable: bool
    memory: PeakMemory
    error: OutputError | None
    precision: Precision = Precision.AUTO
