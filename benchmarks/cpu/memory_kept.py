"""Memory that a process keeps on a CPU: after a long text and 100 short ones.

Usage: python -m benchmarks.cpu.memory_kept [--tokens 4096] [--calls N] [--rounds 5] [--output FILE]

A case runs 100 short texts, one long text and 100 short ones again. "MB kept" is the resident memory at the end, above
the resident memory before the long text. "onnxruntime" is a plain export with ONNX Runtime's settings, "openvino" the
Hugging Face model in OpenVINO. All compute in float32.

With --calls N, N texts of random lengths of 1 to --tokens tokens, on a logarithmic scale, run through a session
instead: in ONNX Runtime and OpenVINO, in two attentions, in float32 and, where the CPU has it, bfloat16. Resident
memory after a call, as the median of each tenth of the calls, is recorded as "resident_mb". "MB kept" is the last
tenth's above the fifth tenth's: next to nothing if memory has stopped growing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu.dense import load_plain, write_plain_export
from benchmarks.cpu.models import BUNDLE, build_bundle, load_bundle
from benchmarks.cpu.openvino import load_openvino
from benchmarks.cpu.targets import Figure, Run, Target, random_ids, run_cases
from hdexport.bench.measure.calls import timed, with_growth
from hdexport.support.memory import peak_resident_bytes, resident_bytes
from hdruntime.backends.openvino.devices import chosen_device, new_core

_KEEPERS = ("bundle-onnxruntime", "bundle-openvino", "onnxruntime", "openvino")

_SHORT_LENGTHS = (16, 128)
"""Tokens of the short texts, in turn."""

_SHORT_TEXTS = 100
_VOCAB_SIZE = 1000

_ATTENTIONS = {"dense": None, "window": "window:64"}
_RANDOM = "random-lengths"
_PARTS, _LATE_PARTS = 10, 5
_GROWS_MB = 10.0
"""Resident memory may grow by so much in the last parts of the calls with random lengths."""

_KEPT = 0.05


def main() -> int:
    """Run all cases, or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of the long text, or of the longest random one")
    parser.add_argument("--calls", type=int, help="of random lengths, in place of the long text")
    return run_cases("benchmarks.cpu.memory_kept", parser, _case_figures, _comparison)


def flat_targets() -> list[Target]:
    """How far the memory of a session may grow late."""
    return [Target(case, None, Figure.KEPT, _GROWS_MB) for case in _random_cases()]


def grown_by(run: Run, calls: int, tokens: int) -> dict[str, Any]:
    """The growth of resident memory in the last half of calls with texts of random lengths."""
    lengths = np.exp(np.random.default_rng(0).uniform(0, np.log(tokens + 1), calls)).astype(int)
    resident, latencies, cpu = [], [], []
    for length in lengths:
        ids = random_ids(int(length), _VOCAB_SIZE)
        _, latency_ms, cpu_ms = timed(lambda ids=ids: run(ids) is not None)  # type: ignore[misc]
        latencies.append(latency_ms)
        cpu.append(cpu_ms)
        resident.append((resident_bytes() or 0) / 1e6)
    # The memory after one call is of its length; the median of many calls is of all lengths.
    parts = [float(np.median(part)) for part in np.array_split(resident, _PARTS)]
    return {
        "latency_ms": statistics.median(latencies),
        "cpu_ms": statistics.median(cpu),
        "growth_bytes": 0,
        "peak_bytes": peak_resident_bytes(),
        "kept_mb": parts[-1] - parts[-1 - _LATE_PARTS],
        "resident_mb": parts,
    }


def targets() -> list[Target]:
    """Most memory that ours may keep."""
    return [
        Target("bundle-onnxruntime", "onnxruntime", Figure.KEPT, _KEPT),
        Target("bundle-onnxruntime", "openvino", Figure.KEPT, 1.0),
        Target("bundle-openvino", "openvino", Figure.KEPT, 1.0),
    ]


def kept_by(run: Run, tokens: int) -> dict[str, Any]:
    """The memory that a model keeps, its latency for short texts at the end, and its growth for the long text."""
    short = [random_ids(_SHORT_LENGTHS[number % len(_SHORT_LENGTHS)], _VOCAB_SIZE) for number in range(_SHORT_TEXTS)]
    for ids in short:
        run(ids)
    before_bytes = resident_bytes()
    long = random_ids(tokens, _VOCAB_SIZE)
    _, growth_bytes = with_growth(lambda: run(long) is not None)
    peak_bytes = peak_resident_bytes()
    calls = [timed(lambda ids=ids: run(ids) is not None) for ids in short]  # type: ignore[misc]
    after_bytes = resident_bytes()
    assert before_bytes is not None
    assert after_bytes is not None
    return {
        "latency_ms": statistics.median(latency_ms for _, latency_ms, _ in calls),
        "cpu_ms": statistics.median(cpu_ms for _, _, cpu_ms in calls),
        "growth_bytes": growth_bytes,
        "peak_bytes": peak_bytes,
        "kept_mb": (after_bytes - before_bytes) / 1e6,
        "resident_mb": after_bytes / 1e6,
    }


def _case_figures(options: argparse.Namespace) -> dict[str, Any]:
    model, *tokens = options.case.split()
    if model == _RANDOM:
        attention, backend, precision = tokens
        run = load_bundle(options.models / attention, backend, precision=precision)
        return grown_by(run, options.calls, options.tokens)
    return kept_by(_load(model, options.models), options.tokens)


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.baselines import BASELINES
    from hdexport.attention.registry import attention_from_spec
    from hdexport.bench.baselines.baseline import MeasuredModel
    from hdexport.checkpoint import default_model

    source, _ = default_model()
    if options.calls:
        for attention, spec in _ATTENTIONS.items():
            build_bundle(
                options.models, source=source, name=attention, max_len=options.tokens, targets=("openvino",),
                attention=attention_from_spec(spec),
            )  # fmt: skip
        about = {"calls": options.calls, "tokens": options.tokens}
        return {"cases": _random_cases(), "targets": flat_targets(), **about}
    build_bundle(options.models, source=source, max_len=options.tokens, targets=("openvino",))
    subject = MeasuredModel(bundle=options.models / BUNDLE, checkpoint=str(source))
    BASELINES["openvino"].prepare(subject, options.models, device="cpu")
    write_plain_export(options.models / "plain.onnx", options.tokens)
    return {"cases": _KEEPERS, "targets": targets(), "tokens": options.tokens}


def _random_cases() -> list[str]:
    ways = ["onnxruntime float32", "openvino float32"]
    ways += ["openvino bfloat16"] if chosen_device(new_core(), None).has_bfloat16 else []
    return [f"{_RANDOM} {attention} {way}" for attention in _ATTENTIONS for way in ways]


def _load(model: str, folder: Path) -> Run:
    if model == "onnxruntime":
        return load_plain(folder / "plain.onnx")
    if model == "openvino":
        return load_openvino(folder / "openvino", model)
    backend = "openvino" if model == "bundle-openvino" else "onnxruntime"
    return load_bundle(folder / BUNDLE, backend, precision="float32")


if __name__ == "__main__":
    sys.exit(main())
