"""Sparse vectors on a CPU: `hdruntime.SparseEncoder` against sentence-transformers', in time and memory.

Usage: python -m benchmarks.cpu.sparse_vectors [--tokens 512 --tokens 4096] [--rounds 3] [--threads 1] [--output FILE]

The model is a BERT of base's shape, 768 wide with a vocabulary of 30522, with two layers, random weights and the sample
model's tokenizer: its vectors mean nothing, and its head costs as much as SPLADE's. The text is Python's own help.
Every run has a process of its own, whose peak memory is counted above its memory with the model loaded and a text of a
few tokens run. All vectors must agree.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import show
from benchmarks.texts import HELP, tokenizer_of

_MAX_LEN, _LAYERS = 4096, 2

_ATOL = 1e-4

_RUNS = ("onnxruntime", "openvino", "sentence-transformers")


def main() -> int:
    """Make the model, and run each library in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", choices=_RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(_measured(options.run, options.models, options.tokens[0], options.rounds, options.threads)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        _make_models(Path(scratch))
        for tokens in options.tokens or (512, 4096):
            found = {name: _in_process(name, Path(scratch), tokens, options) for name in _RUNS}
            vectors = {name: np.load(Path(scratch) / f"{name}.npy") for name in _RUNS}
            expected = vectors["sentence-transformers"]
            difference = max(float(np.abs(vector - expected).max()) for vector in vectors.values())
            if difference > _ATOL:
                print(f"{tokens} tokens: the vectors differ by {difference:.2g}, more than {_ATOL:g}")
                return 1
            show(
                options.output,
                module="benchmarks.cpu.sparse_vectors",
                tokens=tokens,
                threads=options.threads,
                active=int((expected > 0).sum()),
                max_abs_difference=difference,
                **found,
            )
    return 0


def _in_process(name: str, models: Path, tokens: int, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.cpu.sparse_vectors", "--run", name, "--models", str(models)]
    command += ["--tokens", str(tokens), "--rounds", str(options.rounds), "--threads", str(options.threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measured(name: str, models: Path, tokens: int, rounds: int, threads: int) -> dict[str, float]:
    encode = _encoder(name, models, threads)
    whole = tokenizer_of(models / "bundle/tokenizer.json").encode(HELP)
    text = HELP[whole.offsets[1][0] : whole.offsets[tokens - 2][1]]
    encode("few tokens")
    before, times = _peak_mb(), []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        vector = encode(text)
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    np.save(models / f"{name}.npy", vector)
    latency, cpu = (1000 * float(np.median(each)) for each in zip(*times, strict=True))
    return {"latency_ms": round(latency), "cpu_ms": round(cpu), "memory_mb": round(_peak_mb() - before)}


def _encoder(name: str, models: Path, threads: int) -> Callable[[str], Any]:
    """Text -> float32 [vocabulary]."""
    if name == "sentence-transformers":
        import torch
        from sentence_transformers import SparseEncoder as Theirs

        torch.set_num_threads(threads)
        theirs = Theirs(str(models / "checkpoint"), device="cpu")
        return lambda text: theirs.encode(text, convert_to_sparse_tensor=False).numpy()
    from hdruntime import SparseEncoder

    ours = SparseEncoder(models / "bundle", max_seq_length="bundle", backend=name, threads=threads)
    return lambda text: ours.encode(text).dense()


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _make_models(scratch: Path) -> None:
    import torch
    import transformers
    from sentence_transformers import SparseEncoder

    from hdexport.build import BuildOptions, build
    from hdexport.checkpoint import default_model

    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(default_model()[0]), model_max_length=_MAX_LEN)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), num_hidden_layers=_LAYERS, max_position_embeddings=_MAX_LEN, initializer_range=0.05
    )
    transformers.BertForMaskedLM(config).save_pretrained(scratch / "bert")
    tokenizer.save_pretrained(scratch / "bert")
    SparseEncoder(str(scratch / "bert"), device="cpu").save_pretrained(str(scratch / "checkpoint"))
    build(
        BuildOptions(
            model=scratch / "checkpoint", output=scratch / "bundle", max_len=_MAX_LEN, openvino=True, verify=None
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
