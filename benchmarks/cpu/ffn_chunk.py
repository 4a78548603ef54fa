"""Feed-forward networks in chunks of tokens on a CPU, against whole ones; what TensorRT-RTX plans for them.

Usage: python -m benchmarks.cpu.ffn_chunk [--tokens 4096 16384] [--short 512] [--chunk 256] [--rounds 5] [--output FILE]

The model has the shape of BERT-base with four layers, windows of 256 tokens on each side, and random weights, on which
speed does not depend. Both bundles must give the same answer. "short" is a short text, for which both are called by
turns in one process. Engines compute networks whole: what TensorRT-RTX plans
for the longest text, in float16, is listed for the model as it is and with its networks cut out, which no chunk can
beat; with dense attention as well. Planning needs no GPU.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import logging
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.cpu.family_shapes import VOCAB_SIZE
from benchmarks.cpu.models import build_bundle, load_bundle, save_checkpoint
from benchmarks.cpu.targets import Figure, Target, child_arguments, figures_of, output_of, random_ids, run_cases
from hdexport.bench.measure.calls import timed

_MODULE = "benchmarks.cpu.ffn_chunk"
_WHOLE, _CHUNKS, _SHORT = "whole", "chunks", "short"
_SHORT_CALLS = 30
_WINDOW = "window:256"
_ENGINES = {"dense attention": None, "windows": _WINDOW}
_PLANS = "plans"
"""Case that is not timed."""

_TOLERANCE = 1e-4
_PLANNED = re.compile(r"Total Activation Memory: (\d+) bytes")


def main() -> int:
    """Run all cases, or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=(4096, 16384))
    parser.add_argument("--short", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    return run_cases(_MODULE, parser, _case_figures, _comparison)


def targets(lengths: tuple[int, ...]) -> tuple[Target, ...]:
    """Chunks cost no time at any length, and save memory at the longest."""
    return (
        Target(_SHORT, None, Figure.OVERHEAD, 1.05),
        *(Target(f"{_CHUNKS} {tokens}", f"{_WHOLE} {tokens}", Figure.CPU_TIME, 1.05) for tokens in lengths),
        Target(f"{_CHUNKS} {lengths[-1]}", f"{_WHOLE} {lengths[-1]}", Figure.MEMORY, 0.75),
    )


def _case_figures(options: argparse.Namespace) -> dict[str, Any]:
    if options.case == _PLANS:
        return _planned_bytes(options)
    if options.case == _SHORT:
        return _short_figures(options)
    bundle, tokens = options.case.split()
    run = load_bundle(options.models / bundle, "onnxruntime")
    return figures_of(run, random_ids(int(tokens), VOCAB_SIZE), warm_up_tokens=512)


def _short_figures(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of chunks, and how many times as much CPU time they take, by calls in turn with the whole networks'."""
    ids = random_ids(options.short, VOCAB_SIZE)
    runs = {bundle: load_bundle(options.models / bundle, "onnxruntime") for bundle in (_WHOLE, _CHUNKS)}
    figures = {bundle: figures_of(run, ids) for bundle, run in runs.items()}
    cpu_ms: dict[str, list[float]] = {bundle: [] for bundle in runs}
    for _ in range(_SHORT_CALLS):
        for bundle, run in runs.items():
            cpu_ms[bundle].append(timed(functools.partial(run, ids))[2])
    medians = {bundle: statistics.median(times) for bundle, times in cpu_ms.items()}
    return figures[_CHUNKS] | {"cpu_ms": medians[_CHUNKS], "overhead": medians[_CHUNKS] / medians[_WHOLE]}


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    lengths = tuple(sorted(options.tokens))
    save_checkpoint(options.models, "bert", layers=options.layers)
    for bundle, chunk in ((_WHOLE, None), (_CHUNKS, options.chunk)):
        _build(options, bundle, attention=_WINDOW, ffn_chunk=chunk)
    return {
        "cases": [_SHORT, *(f"{bundle} {tokens}" for tokens in lengths for bundle in (_WHOLE, _CHUNKS))],
        "targets": targets(lengths),
        "same_answers": {f"{_CHUNKS} {tokens}": (f"{_WHOLE} {tokens}", _TOLERANCE) for tokens in lengths},
        "chunk": options.chunk,
        "layers": options.layers,
        "engine_bytes": _engine_bytes(options),
    }


def _build(options: argparse.Namespace, name: str, *, attention: str | None, **changes: Any) -> None:
    from hdexport.attention.registry import attention_from_spec

    given = {"attention": attention_from_spec(attention), **changes}
    build_bundle(options.models, max_len=max(options.tokens), name=name, **given)


def _engine_bytes(options: argparse.Namespace) -> dict[str, int] | None:
    """Planned memory by attention; None without TensorRT-RTX."""
    if importlib.util.find_spec("tensorrt_rtx") is None:
        print("TensorRT-RTX is not installed here; its plans are left out.", file=sys.stderr)
        return None
    for name, attention in _ENGINES.items():
        _build(options, name, attention=attention, precision="float16")
    # A logger is for good in a process.
    planned = output_of(["-m", _MODULE, *child_arguments(options), "--case", _PLANS])
    for name, figure in planned.items():
        print(f"TensorRT-RTX, {name}: {figure / 1e6:.0f} MB planned")
    return planned


def _planned_bytes(options: argparse.Namespace) -> dict[str, int]:
    """TensorRT-RTX's plan of memory for a text of the most tokens, with and without feed-forward networks."""
    import onnx_ir as ir

    from hdexport.graph.passes.chunk_feed_forward import feed_forward_networks
    from hdexport.graph.targets.tensorrt.lowering import tensorrt_graph

    planned = {}
    for name in _ENGINES:
        bundle = options.models / name
        graph = tensorrt_graph(ir.load(bundle / "model.onnx"), dtype="float16")
        planned[name] = _planned_for(graph, bundle, max(options.tokens))
        for network in feed_forward_networks(graph.graph, layers=options.layers):
            ir.convenience.replace_all_uses_with(network.result, network.source)
            network.graph.remove(network.nodes, safe=True)
        planned[f"{name}, networks cut out"] = _planned_for(graph, bundle, max(options.tokens))
    return planned


def _planned_for(graph: Any, bundle: Path, tokens: int) -> int:
    import onnx_ir as ir

    from hdexport.graph.targets.tensorrt.builder import build_engine
    from hdexport.graph.targets.tensorrt.packages import EngineTarget
    from hdruntime.bundle.manifest import Backend, ProfileShape

    messages = _Messages()
    log = logging.getLogger("hdruntime.backends.tensorrt.log")
    log.addHandler(messages)
    log.setLevel(logging.DEBUG)
    path = bundle / "lowered.onnx"
    ir.save(graph, path)
    profile = ProfileShape(batch=(1, 1, 1), tokens=(1, tokens // 2, tokens))
    target = EngineTarget(Backend.TENSORRT_RTX, ())
    build_engine(path, bundle / "planned.engine", target, bundle=bundle, profiles=[profile], precision="float16")
    log.removeHandler(messages)
    return max(int(found) for text in messages.texts for found in _PLANNED.findall(text))


class _Messages(logging.Handler):
    """Keeps logged messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


if __name__ == "__main__":
    sys.exit(main())
