"""A corpus by a bundle and by llama.cpp, in float32 and with weights of 8 bits.

Usage: python -m benchmarks.cpu.llama BUNDLE --python PYTHON [--corpus short] [--rounds 2]

The bundle is of a BERT that pools by the mean, as the sample model. PYTHON is the interpreter of an environment with
llama-cpp-python, gguf and safetensors (`pip install llama-cpp-python gguf safetensors` compiles for some minutes).
llama.cpp runs the checkpoint with the bundle's positions, and does not scale queries by log n: vectors are compared of
texts within the trained positions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import hdruntime
from benchmarks.corpus import embed_script
from benchmarks.corpus.bench import SAMPLES, texts_of
from benchmarks.record import show
from hdexport.bench.baselines.baseline import checkpoint_folder
from hdexport.bench.measure.calls import environment
from hdexport.bench.measure.processes import run_process
from hdexport.bench.run.plan import BenchOptions, plan

_LEAST_COSINE = {"F32": 0.99999, "Q8_0": 0.998}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--python", required=True)
    parser.add_argument("--corpus", default="short", choices=sorted(SAMPLES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    planned = plan(BenchOptions(bundles=(options.bundle,), baselines=(), backends=("onnxruntime",)))
    manifest = planned.series[0].bundle.manifest
    texts = texts_of(options.corpus)
    found: dict[str, list[Any]] = {"bundle": [], **{name: [] for name in _LEAST_COSINE}}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        file = scratch / "texts.json"
        file.write_text(json.dumps(texts), encoding="utf-8")
        request = {"texts": str(file), "threads": planned.threads, "max_len": manifest.max_len}
        request |= {"bundle": str(options.bundle), "backend": "onnxruntime", "precision": "auto"}
        request |= {"warm_up_texts": 8, "least_seconds": 0.0}
        request["model"] = str(checkpoint_folder(planned.series[0].model, scratch))
        for _ in range(options.rounds):
            for name, outcomes in found.items():
                asked = scratch / f"{name}.json"
                asked.write_text(json.dumps(request | {"weights": name, "output": str(scratch / f"{name}.npy")}))
                is_ours = name == "bundle"
                script = embed_script.__file__ if is_ours else Path(__file__).with_name("llama_script.py")
                python = None if is_ours else options.python
                outcomes.append(run_process([str(script), str(asked)], python=python, time_limit_s=1200))
                if outcomes[-1].output is None or "seconds" not in outcomes[-1].output:
                    raise SystemExit(f"{name}: {outcomes[-1].reason}")
        vectors = {name: np.load(scratch / f"{name}.npy") for name in found}
    with hdruntime.load(options.bundle, "onnxruntime") as session:
        lengths = list(map(len, session.tokenize(texts, overflow="truncate")))
    short = np.array(lengths) <= (manifest.positions.trained or manifest.max_len)
    cosines = {name: float((each * vectors["bundle"]).sum(1)[short].min()) for name, each in vectors.items()}
    for name, least in _LEAST_COSINE.items():
        if not cosines[name] >= least:
            raise SystemExit(f"{name}: a vector's cosine with the bundle's is {cosines[name]:.5f}, below {least}")
    show(
        options.output,
        module="benchmarks.cpu.llama",
        cpu=environment(planned.threads)["cpu"],
        texts_per_second={
            name: len(texts) / statistics.median(outcome.output["seconds"] for outcome in outcomes)
            for name, outcomes in found.items()
        },
        peak_bytes={name: max(outcome.peak_rss_bytes for outcome in outcomes) for name, outcomes in found.items()},
        least_cosine=cosines,
    )


if __name__ == "__main__":
    main()
