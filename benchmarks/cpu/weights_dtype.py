"""Weights in the checkpoint's half precision beside float32 copies, and int8 with and without calibration, by size.

Usage: python -m benchmarks.cpu.weights_dtype [--shapes sample bert 0.6B] [--cases kept float32 ...] [--folder FOLDER]
           [--output FILE]

It shows from which size on a bundle is better off with half-precision weights (`MIN_MODEL_BYTES` of
`hdexport.model.half_weights`) and without calibration (`MIN_PARAMETERS` of `hdexport.quantize`). The checkpoints are in
bfloat16: all-MiniLM-L6-v2 (22 million parameters), and random weights in the shapes of BERT-base (110 million) and of
Qwen3-Embedding-0.6B. Bundles are built without a comparison with PyTorch. Each session is a process of its own with a
text of 128 tokens. Calibration of a model of 350 million parameters had not ended after nine minutes, so the largest
has no such case.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu import embedders
from benchmarks.cpu.embedders import figures_of_process, size_of
from benchmarks.cpu.large import save_checkpoint as save_large
from benchmarks.record import show

SHAPES = ("sample", "bert", "0.6B")
_NEVER_CALIBRATED = "0.6B"

CASES = {
    "kept": ("half_weights.MIN_MODEL_BYTES = 0", []),
    "float32": ("", ["--fp32-weights"]),
    "int8": ("bundle.MIN_PARAMETERS = 0", ["--int8"]),
    "calibrated": ("bundle.MIN_PARAMETERS = 2**62", ["--int8"]),
}
"""Case -> a threshold that decides otherwise, and options of the build."""

_SESSIONS = {
    "kept": ("onnxruntime float32", "openvino float32", "openvino bfloat16"),
    "float32": ("onnxruntime float32", "openvino float32", "openvino bfloat16"),
    "int8": ("openvino int8",),
    "calibrated": ("openvino int8",),
}
_BUILD = """
import sys
from hdexport.model import half_weights
from hdexport.quantize import bundle
from hdexport.cli import main
{threshold}
sys.exit(main())
"""
_TOKENS, _THREADS, _VOCAB_SIZE = 128, 2, 30_000


def save_checkpoint(directory: Path, shape: str) -> None:
    """Save a checkpoint in bfloat16, whose embeddings are those of sentence-transformers."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from transformers import AutoTokenizer, BertConfig, BertModel

    from hdexport.checkpoint import default_model

    sample = str(default_model()[0])
    if shape == "0.6B":
        save_large(directory, shape)
    elif shape == "sample":
        SentenceTransformer(sample, model_kwargs={"dtype": torch.bfloat16}).save_pretrained(str(directory))
    else:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as base:
            BertModel(BertConfig()).to(torch.bfloat16).save_pretrained(base)
            AutoTokenizer.from_pretrained(sample).save_pretrained(base)
            encoder = Transformer(base, model_kwargs={"dtype": torch.bfloat16})
            pooling = Pooling(encoder.get_embedding_dimension(), "mean")
            SentenceTransformer(modules=[encoder, pooling]).save_pretrained(str(directory))


def build(checkpoint: Path, case: str, output: Path) -> dict[str, Any]:
    """Build the bundle of a case; the figures of the build."""
    threshold, options = CASES[case]
    command = ["build", str(checkpoint), "--max-len", "512", "--target", "openvino", "--verify", "none", *options]
    code = _BUILD.format(threshold=threshold)
    figures = figures_of_process([sys.executable, "-c", code, *command, "--force", "-o", str(output)])
    return {**figures, "bundle_bytes": size_of(output)}


def session(bundle: Path, variant: str) -> dict[str, Any]:
    """The figures of a session; its embedding is left out."""
    found = embedders.measured(
        sys.executable, embedder="bundle", step="run", model=str(bundle), variant=variant, threads=_THREADS,
        lengths=[_TOKENS], vocab_size=_VOCAB_SIZE,
    )  # fmt: skip
    return {name: value for name, value in found.items() if name != "embeddings"}


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield "| model | weights | session | opens in | peak memory | 128 tokens |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        seconds = row["run_s"][str(_TOKENS)]["median"]
        yield (
            f"| {row['shape']} | {row['case']} | {row['session']} | {row['load_s']:.2f} s | "
            f"{row['peak_bytes'] / 1e9:.2f} GB | {seconds * 1e3:.1f} ms |"
        )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        for shape in options.shapes:
            checkpoint = folder / shape
            if not checkpoint.is_dir():
                code = "import sys, pathlib; from benchmarks.cpu.weights_dtype import save_checkpoint; "
                code += "save_checkpoint(pathlib.Path(sys.argv[1]), sys.argv[2])"
                figures_of_process([sys.executable, "-c", code, str(checkpoint), shape])
            for case in options.cases:
                if case == "calibrated" and shape == _NEVER_CALIBRATED:
                    continue
                bundle = folder / f"{shape}-{case}"
                about = {"module": "benchmarks.cpu.weights_dtype", "shape": shape, "case": case}
                show(options.output, **about, session=None, **build(checkpoint, case, bundle))
                for variant in _SESSIONS[case]:
                    rows.append({**about, "session": variant, **session(bundle, variant)})
                    show(options.output, **rows[-1])
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
