"""Dense attention on a CPU: the bundle's lowering against PyTorch SDPA and a plain export, at one length.

Usage: python -m benchmarks.cpu.dense [--tokens 4096] [--model-type TYPE] [--rounds 5] [--output FILE]

Every case must give PyTorch's answer. The input is text: the topics of Python's own help. The model is the sample
model, or a random one of a type, two layers with two heads of 64, so that scores of 16384 tokens fit: its growth of
memory says whether a type that no family has reaches our dense operator.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu.models import HUGGING_FACE, build_bundle, load_bundle, run_of_torch, save_checkpoint
from benchmarks.cpu.targets import Figure, Run, Target, figures_of, run_cases
from hdexport.bench.baselines.baseline import Texts
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
_OF_TYPE = ("torch-sdpa", "plain-export", "bundle-float32")
"""The cases of a random model of a type."""

_OF_PLAIN = 0.2
"""Where attention is dense, a bundle's memory grows at most by this part of the plain export's growth."""

_SMALL = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 512}


def main() -> int:
    """Run all cases, or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--model-type", help="of a small random model (default: the sample model)")
    return run_cases("benchmarks.cpu.dense", parser, _case_figures, _comparison)


def _case_figures(options: argparse.Namespace) -> dict[str, Any]:
    texts = Texts(open_bundle(options.models / "bundle-float32"))
    run = _load(options.case, options)
    return figures_of(run, texts.batch(1, options.tokens)["input_ids"])


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    from hdexport.checkpoint import default_model

    about = {"targets": TARGETS, "same_answers": SAME_ANSWERS, "tokens": options.tokens}
    if options.model_type is None:
        for precision in ("float32", "float16"):
            build_bundle(
                options.models,
                source=default_model()[0],
                name=f"bundle-{precision}",
                max_len=options.tokens,
                precision=precision,
            )
        write_plain_export(options.models / "plain.onnx", options.tokens)
        return {"cases": CASES, **about}
    shape = {**_SMALL, "max_position_embeddings": options.tokens}
    save_checkpoint(options.models, options.model_type, layers=2, shape=shape)
    # The conformance tests prove what is measured here.
    build_bundle(options.models, name="bundle-float32", max_len=options.tokens, unverified=True)
    write_plain_export(options.models / "plain.onnx", options.tokens, source=options.models / HUGGING_FACE)
    attention = open_bundle(options.models / "bundle-float32").manifest.attention
    is_dense = any(record["type"] == "dense" for record in attention)
    about["targets"] = [Target("bundle-float32", "plain-export", Figure.MEMORY, _OF_PLAIN)] if is_dense else []
    return {"cases": _OF_TYPE, **about, "model_type": options.model_type, "attention": attention}


def write_plain_export(path: Path, tokens: int, *, source: Path | None = None) -> None:
    """The model of `torch_model`, exported as PyTorch's documentation shows."""
    from hdexport.bench.baselines.onnx_plain import export_plainly
    from hdexport.model.graph_module import GraphModule, graph_inputs
    from hdruntime.bundle.manifest import Task

    module = GraphModule(
        torch_model(tokens, source=source),
        Task.FEATURE_EXTRACTION,
        inputs=graph_inputs(token_types=0),
    ).eval()
    ids = np.ones((2, 37), np.int64)
    export_plainly(module, path, {"input_ids": ids, "attention_mask": ids.copy()})


def torch_model(tokens: int, *, source: Path | None = None) -> Any:
    """The sample model with positions for so many tokens, or the model of a checkpoint that has as many."""
    from hdexport.checkpoint import default_model, find_checkpoint
    from hdexport.model.positions import DEFAULT_ALPHA
    from hdexport.model.surgery import extend_positions
    from hdruntime.bundle.manifest import Scheme, Task

    checkpoint = find_checkpoint(source or default_model()[0])
    model = checkpoint.load(Task.FEATURE_EXTRACTION)
    # A decoder's keys and values would be kept for a next call.
    model.config.use_cache = False
    if source is None:
        extend_positions(model, checkpoint.family, max_len=tokens, scheme=Scheme.HIERARCHICAL, alpha=DEFAULT_ALPHA)
    return model


def _load(case: str, options: argparse.Namespace) -> Run:
    models = options.models
    if case == "torch-sdpa":
        return run_of_torch(torch_model(options.tokens, source=options.model_type and models / HUGGING_FACE))
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
