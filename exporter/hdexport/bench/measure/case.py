"""One case of a benchmark: what its process is told, and what it says."""

from __future__ import annotations

__all__ = ["CaseFigures", "CaseSpec"]

from dataclasses import dataclass

from hdexport.bench.results.result import OutputError, PeakMemory


@dataclass(frozen=True, kw_only=True)
class CaseSpec:
    """What a process measures.

    Attributes:
        runner: a backend of the runtime or a peer, as in `Series.runner`.
        bundle: the bundle that is run, or whose model a peer runs.
        artefact: what the peer's preparation made: a folder or an ONNX file; None for backends and peers without one.
        inputs: an ``.npz`` of the inputs of the bundle's manifest, int64 [batch, tokens] each.
        expected: a folder of PyTorch's outputs in float32, a ``.npy`` file each; None measures without comparing.
        device: ``cpu`` or ``cuda``.
        threads: CPU threads.
        least_runs: timed at least.
        least_seconds: the timed runs together take at least that; 0 is a probe of memory, which is not warmed up.
    """

    runner: str
    bundle: str
    artefact: str | None
    inputs: str
    expected: str | None
    device: str
    threads: int
    least_runs: int
    least_seconds: float


@dataclass(frozen=True, kw_only=True)
class CaseFigures:
    """What one process measured.

    Attributes:
        latencies_ms: of each timed run, in order.
        is_stable: whether the warm-up ended because the latency no longer changed.
        memory: its peaks.
        error: None where nothing was compared.
    """

    latencies_ms: tuple[float, ...]
    is_stable: bool
    memory: PeakMemory
    error: OutputError | None
