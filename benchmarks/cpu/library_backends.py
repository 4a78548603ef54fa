"""A corpus in sentence-transformers' own backends, in its ONNX backend on a bundle, and in hdruntime.

Usage: python -m benchmarks.cpu.library_backends BUNDLE [--optimum PYTHON] [--texts 200] [--rounds 3]

BUNDLE is one of a model that sentence-transformers loads, whose checkpoint is `--model`, by default the sample model.
PYTHON is that of an environment with optimum-onnx and sentence-transformers, which cannot share ours: optimum-onnx
0.1 needs transformers before 4.58, sentence-transformers 6 a later one. Texts are chunks of Python's own help, of 8 to
1200 words on a logarithmic scale. Each case is a process, the cases take turns, medians over the rounds; all have two
threads, and the library's default batch size of 32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.texts import HELP
from hdexport.checkpoint.source import sample_path

_CHILD = """
import json, sys, time, resource
import numpy as np
how, model, texts, vectors = sys.argv[1:]
texts = json.load(open(texts))
if how == "hdruntime":
    from hdruntime import SentenceEncoder
    encoder = SentenceEncoder(model, max_seq_length="model", threads=2)
else:
    import torch
    from sentence_transformers import SentenceTransformer
    torch.set_num_threads(2)
    options = {}
    if how != "torch":
        import onnxruntime
        session_options = onnxruntime.SessionOptions()
        session_options.intra_op_num_threads = 2
        options = {"backend": "onnx", "model_kwargs": {"session_options": session_options}}
        if how == "onnx cpu graph":
            options["model_kwargs"]["file_name"] = "onnxruntime_cpu.onnx"
        if how == "onnx export":
            options["model_kwargs"]["export"] = True
    encoder = SentenceTransformer(model, device="cpu", **options)
encoder.encode(texts[:8])
began = time.perf_counter()
found = encoder.encode(texts)
seconds = time.perf_counter() - began
np.save(vectors, found)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"texts_per_s": len(texts) / seconds, "peak_mb": peak}))
"""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--model", type=Path, default=sample_path())
    parser.add_argument("--optimum", type=Path)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cases = {
        ("torch", sys.executable, options.model): "torch",
        ("hdruntime", sys.executable, options.bundle): "hdruntime.SentenceEncoder(bundle)",
    }
    if options.optimum is not None:
        cases |= {
            ("onnx export", options.optimum, options.model): 'backend="onnx", optimum\'s export',
            ("onnx", options.optimum, options.bundle): 'backend="onnx" on the bundle',
            ("onnx cpu graph", options.optimum, options.bundle): "the same, onnxruntime_cpu.onnx",
        }
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder, "texts.json")
        texts.write_text(json.dumps(_texts(options.texts)))
        figures: dict[str, list[dict[str, float]]] = {name: [] for name in cases.values()}
        for _ in range(options.rounds):
            for (how, python, model), name in cases.items():
                figures[name].append(_measured(how, str(python), str(model), texts, Path(folder, f"{name}.npy")))
        reference = np.load(Path(folder, "torch.npy"))
        print(f"{'':40} texts/s  peak MB  largest difference from torch")
        for name, rounds in figures.items():
            speed, peak = (statistics.median(each[key] for each in rounds) for key in ("texts_per_s", "peak_mb"))
            error = np.abs(np.load(Path(folder, f"{name}.npy")) - reference).max()
            print(f"{name:40} {speed:7.1f}  {peak:7.0f}  {error:.1e}", flush=True)


def _texts(number: int) -> list[str]:
    words = HELP.split()
    lengths = np.random.default_rng(0).permutation(np.geomspace(8, 1200, number).astype(int))
    starts = np.random.default_rng(1).integers(0, len(words) - 1200, number)
    return [" ".join(words[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


def _measured(how: str, python: str, model: str, texts: Path, vectors: Path) -> dict[str, float]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)
    command = [python, "-c", _CHILD, how, model, str(texts), str(vectors)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{how}: {done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


if __name__ == "__main__":
    main()
