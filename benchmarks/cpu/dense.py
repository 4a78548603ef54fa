"""Dense attention on a CPU: the bundle's lowering against PyTorch SDPA and a plain export, at one length.

Usage: python -m benchmarks.cpu.dense [--tokens 4096] [--rounds 5] [--output FILE]

Every case must give PyTorch's answer. The input is text: the topics of Python's own help.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu.models import build_bundle, load_bundle, run_of_torch
from benchmarks.cpu.targets import Figure, Run, Target, figures_of, run_cases
from hdexport.bench.peers.peer import Texts
from hdruntime.bundle.reader import open_bundle

CASES = ("torch-sdpa", "plain-export", "bundle-float32", "bundle-float16")
TARGETS = (
    Target("bundle-float32", "torch-sdpa", Figure.LATENCY, 0.9),
    Target("bundle-float32", "plain-export", Figure.LATENCY, 0.3),
    Target("bundle-float32", "plain-export", Figure.MEMORY, 0.03),
    Target("bundle-float16", "bundle-float32", Figure.LATENCY, 1.15),
)
SAME_ANSWERS = {
    "plain-export": ("torch-sdpa", 1e-3),
    "bundle-float32": ("torch-sdpa", 1e-3),
    "bundle-float16": ("torch-sdpa", 2e-2),
}


def main() -> int:
    """Run all cases, or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    return run_cases("benchmarks.cpu.dense", parser, _case_figures, _comparison)


def _case_figures(options: argparse.Namespace) -> dict[str, Any]:
    texts = Texts(open_bundle(options.models / "bundle-float32"))
    run = _load(options.case, options.models, options.tokens)
    return figures_of(run, texts.batch(1, options.tokens)["input_ids"])


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    _make_models(options.models, options.tokens)
    return {"cases": CASES, "targets": TARGETS, "same_answers": SAME_ANSWERS, "tokens": options.tokens}


def _make_models(models: Path, tokens: int) -> None:
    from hdexport.checkpoint import default_model

    source, _ = default_model()
    for precision in ("float32", "float16"):
        build_bundle(models, source=source, name=f"bundle-{precision}", max_len=tokens, precision=precision)
    write_plain_export(models / "plain.onnx", tokens)


def write_plain_export(path: Path, tokens: int) -> None:
    """The sample model, extended as `torch_model` does it, exported as PyTorch's documentation shows."""
    from hdexport.bench.peers.onnx_plain import export_plainly
    from hdexport.model.graph_module import GraphModule, graph_inputs
    from hdruntime.bundle.manifest import Task

    module = GraphModule(
        torch_model(tokens),
        Task.FEATURE_EXTRACTION,
        inputs=graph_inputs(token_types=0),
    ).eval()
    ids = np.ones((2, 37), np.int64)
    export_plainly(module, path, {"input_ids": ids, "attention_mask": ids.copy()})


def torch_model(tokens: int) -> Any:
    """The sample model with positions for so many tokens."""
    from hdexport.checkpoint import default_model, find_checkpoint
    from hdexport.model.positions import DEFAULT_ALPHA
    from hdexport.model.surgery import extend_positions
    from hdruntime.bundle.manifest import Scheme, Task

    checkpoint = find_checkpoint(default_model()[0])
    model = checkpoint.load(Task.FEATURE_EXTRACTION)
    extend_positions(model, checkpoint.family, max_len=tokens, scheme=Scheme.HIERARCHICAL, alpha=DEFAULT_ALPHA)
    return model


def _load(case: str, models: Path, tokens: int) -> Run:
    if case == "torch-sdpa":
        return run_of_torch(torch_model(tokens))
    if case == "plain-export":
        return load_plain(models / "plain.onnx")
    return load_bundle(models / case, "onnxruntime")


def load_plain(path: Path) -> Run:
    """An export in ONNX Runtime, with its own settings."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda ids: session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]


if __name__ == "__main__":
    sys.exit(main())
