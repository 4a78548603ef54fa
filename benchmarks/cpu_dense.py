"""Dense attention on a CPU: the bundle's lowering against PyTorch SDPA and a plain export, at one length.

Usage: python benchmarks/cpu_dense.py [--tokens 4096] [--rounds 5] [--output FILE]

Every case runs in a process of its own, all cases once a round; ratios are taken within a round, and their median is
printed with the smallest and largest. Every case must give PyTorch's answer. The input is text: the topics of Python's
own help. Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import numpy.typing as npt

from targets import Figure, Run, Target, compare, figures_of, read_options, report

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
    """Parse, and run all cases or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    options = read_options(parser)
    if options.case:
        run = _load(options.case, options.models, options.tokens)
        print(json.dumps(figures_of(run, _token_ids(options.models, options.tokens))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        _make_models(Path(folder), options.tokens)
        result = compare(
            __file__,
            CASES,
            TARGETS,
            rounds=options.rounds,
            arguments=["--models", folder, "--tokens", str(options.tokens)],
            same_answers=SAME_ANSWERS,
            tokens=options.tokens,
        )
    return report(result, options.output)


def _make_models(models: Path, tokens: int) -> None:
    from hdexport.build import BuildOptions, build
    from hdexport.checkpoint import default_model

    source, _ = default_model()
    for precision in ("float32", "float16"):
        build(
            BuildOptions(
                model=source, output=models / f"bundle-{precision}", max_len=tokens, precision=precision, verify=None
            )
        )
    _export_plainly(models / "plain.onnx", tokens)


def _export_plainly(path: Path, tokens: int) -> None:
    from hdexport.bench.peers.onnx_plain import export_plainly
    from hdexport.model.graph_module import GraphModule
    from hdexport.model.tasks import Task

    module = GraphModule(
        _torch_model(tokens),
        Task.FEATURE_EXTRACTION,
        has_token_types=False,
        folded_token_types=False,
        folded_positions=False,
    ).eval()
    ids = np.ones((2, 37), np.int64)
    export_plainly(module, path, {"input_ids": ids, "attention_mask": ids.copy()})


def _torch_model(tokens: int) -> Any:
    from hdexport.checkpoint import default_model, find_checkpoint
    from hdexport.model.positions import DEFAULT_ALPHA, Scheme
    from hdexport.model.surgery import extend_positions
    from hdexport.model.tasks import Task

    checkpoint = find_checkpoint(default_model()[0])
    model = checkpoint.load(Task.FEATURE_EXTRACTION)
    extend_positions(model, checkpoint.family, max_len=tokens, scheme=Scheme.HIERARCHICAL, alpha=DEFAULT_ALPHA)
    return model


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


if __name__ == "__main__":
    sys.exit(main())
