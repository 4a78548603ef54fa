"""Dense attention on a CPU: the bundle's lowering against PyTorch SDPA and a plain export, at one length.

Usage: python benchmarks/cpu_dense.py [--tokens 4096] [--rounds 5] [--output FILE]

Every case runs in a process of its own, all cases once a round, so that drift of a shared machine hits them alike;
latency ratios are taken within a round, and their median is printed with the smallest and largest. Before anything is
timed, every case must give PyTorch's answer. The input is text: the topics of Python's own help.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import numpy.typing as npt

CASES = ("torch-sdpa", "plain-export", "bundle-float32", "bundle-float16")
TARGETS = (
    # case, against, figure, at most
    ("bundle-float32", "torch-sdpa", "latency", 0.9),
    ("bundle-float32", "plain-export", "latency", 0.3),
    ("bundle-float32", "plain-export", "memory growth", 0.03),
    ("bundle-float16", "bundle-float32", "latency", 1.15),
)

_TIMED_RUNS = 3
_WARM_UP_TOKENS = 64
_TOLERANCE = {"bundle-float16": 2e-2}
"""Largest difference of a token's vector from PyTorch's, 1e-3 where nothing else is said."""

Run = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32]]


def main() -> None:
    """Parse, and run all cases or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="append the result to this file, as a JSON line")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(_measure(options.case, options.models, options.tokens)))
        return
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        _make_models(models, options.tokens)
        result = _run_all(models, options.tokens, options.rounds)
    _print(result)
    if options.output:
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


def _run_all(models: Path, tokens: int, rounds: int) -> dict[str, Any]:
    measured: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for number in range(rounds):
        for case in CASES:
            command = [sys.executable, __file__, "--case", case, "--models", str(models), "--tokens", str(tokens)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            measured[case].append(json.loads(output.splitlines()[-1]))
            print(f"round {number + 1}/{rounds}: {case}", file=sys.stderr)
        if number == 0:
            _check_answers({case: runs[0]["answer"] for case, runs in measured.items()})
    return {
        "benchmark": "cpu_dense",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "cpu": _cpu_name(),
        "tokens": tokens,
        "rounds": rounds,
        "versions": _versions(),
        "cases": {case: _summary(runs) for case, runs in measured.items()},
        "ratios": [_ratio(measured, *target) for target in TARGETS],
    }


def _check_answers(answers: dict[str, list[float]]) -> None:
    for case, answer in answers.items():
        difference = float(np.abs(np.array(answer) - np.array(answers["torch-sdpa"])).max())
        if not difference <= _TOLERANCE.get(case, 1e-3):
            sys.exit(f"{case} gives a wrong answer: it differs from PyTorch by {difference:.3g}.")


def _summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {
        "latency_ms": statistics.median(run["latency_ms"] for run in runs),
        "growth_bytes": statistics.median(run["growth_bytes"] for run in runs),
    }


def _ratio(
    measured: dict[str, list[dict[str, Any]]], case: str, against: str, figure: str, at_most: float
) -> dict[str, Any]:
    key = "latency_ms" if figure == "latency" else "growth_bytes"
    ratios = [ours[key] / theirs[key] for ours, theirs in zip(measured[case], measured[against], strict=True)]
    return {
        "case": case,
        "against": against,
        "figure": figure,
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "target": at_most,
    }


def _print(result: dict[str, Any]) -> None:
    print(f"{result['cpu']}, {result['tokens']} tokens, batch 1, median of {result['rounds']} rounds")
    for case, figures in result["cases"].items():
        print(f"  {case:<16} {figures['latency_ms']:8.0f} ms  {figures['growth_bytes'] / 1e6:8.0f} MB more at peak")
    for ratio in result["ratios"]:
        verdict = "met" if ratio["median"] <= ratio["target"] else "MISSED"
        print(
            f"  {ratio['case']} / {ratio['against']}, {ratio['figure']}: {ratio['median']:.3f} "
            f"({ratio['min']:.3f} to {ratio['max']:.3f}), target {ratio['target']}: {verdict}"
        )


def _make_models(models: Path, tokens: int) -> None:
    from hdexport.build import BuildOptions, build
    from hdexport.checkpoint import default_model

    source, _ = default_model()
    for precision in ("float32", "float16"):
        build(
            BuildOptions(
                model=source, output=models / f"bundle-{precision}", max_len=tokens, precision=precision, verify=False
            )
        )
    _export_plainly(models / "plain.onnx", tokens)


def _export_plainly(path: Path, tokens: int) -> None:
    """What `torch.onnx.export` makes of the model when it is told about dynamic axes and nothing else."""
    import torch

    class LastHiddenState(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = _torch_model(tokens)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    ids = torch.ones(2, 37, dtype=torch.long)
    axes = {0: "batch", 1: "tokens"}
    program = torch.onnx.export(
        LastHiddenState(),
        (ids, ids.clone()),  # one tensor given twice would be traced as one input
        input_names=["input_ids", "attention_mask"],
        output_names=["last_hidden_state"],
        dynamic_shapes=(axes, axes),
        dynamo=True,
        verbose=False,
    )
    program.save(path, external_data=True)


def _torch_model(tokens: int) -> Any:
    from hdexport.checkpoint import default_model, find_checkpoint
    from hdexport.positions import DEFAULT_ALPHA, Scheme
    from hdexport.surgery import extend_positions
    from hdexport.tasks import Task

    checkpoint = find_checkpoint(default_model()[0])
    model = checkpoint.load(Task.FEATURE_EXTRACTION)
    extend_positions(model, checkpoint.family, max_len=tokens, scheme=Scheme.HIERARCHICAL, alpha=DEFAULT_ALPHA)
    return model


def _measure(case: str, models: Path, tokens: int) -> dict[str, Any]:
    run = _load(case, models, tokens)
    ids = _token_ids(models, tokens)
    # Short pieces of the same text bring the weights into memory, so that what grows afterwards is the long input's.
    for start in range(0, tokens, _WARM_UP_TOKENS):
        run(ids[:, start : start + _WARM_UP_TOKENS])
    _reset_peak()
    before_bytes = _memory_bytes("VmRSS")
    answer = run(ids)  # also warms up: the first run pays for every page it touches
    latencies = []
    for _ in range(_TIMED_RUNS):
        start = time.perf_counter()
        run(ids)
        latencies.append((time.perf_counter() - start) * 1e3)
    return {
        "latency_ms": statistics.median(latencies),
        "growth_bytes": _memory_bytes("VmHWM") - before_bytes,
        "answer": answer[0, :: max(1, tokens // 16)].ravel().tolist(),
    }


def _load(case: str, models: Path, tokens: int) -> Run:
    if case == "torch-sdpa":
        return _load_torch(tokens)
    if case == "plain-export":
        return _load_plain(models / "plain.onnx")
    import hdruntime

    session = hdruntime.load(models / case, backend="onnxruntime")
    return lambda ids: session(input_ids=ids)["token_embeddings"]


def _load_torch(tokens: int) -> Run:
    import torch

    model = _torch_model(tokens)

    def run(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            input_ids = torch.from_numpy(ids)
            return model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).last_hidden_state.numpy()

    return run


def _load_plain(path: Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda ids: session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]


def _token_ids(models: Path, tokens: int) -> npt.NDArray[np.int64]:
    """[1, tokens], the start of Python's help topics."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(models / "bundle-float32" / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = tokenizer.encode("\n".join(topics.values())).ids
    assert len(ids) >= tokens, f"Python's help topics have {len(ids)} tokens only"
    return np.array([ids[:tokens]], np.int64)


def _reset_peak() -> None:
    # proc(5): writing 5 resets the peak resident set size, VmHWM.
    Path("/proc/self/clear_refs").write_text("5")


def _memory_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _versions() -> dict[str, str]:
    import importlib.metadata

    return {name: importlib.metadata.version(name) for name in ("hdexport", "torch", "transformers", "onnxruntime")}


if __name__ == "__main__":
    main()
