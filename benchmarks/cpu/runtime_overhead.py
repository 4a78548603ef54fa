"""The cost of the runtime on a CPU: a call, many texts of mixed lengths, and loading.

Usage: python -m benchmarks.cpu.runtime_overhead [--texts 500] [--positions 8192] [--rounds 5] [--output FILE]

The model is all-MiniLM-L6-v2 with more positions, whose bundle has about 100 MB; the texts are chunks of Python's own
help. "session N" is a call with N tokens against the bare call of the same ONNX Runtime session, interleaved
in one process. "embed" is against sentence-transformers, which runs the same checkpoint, sorts the texts by itself, and
has the batch size that was its fastest on a part of the texts; both must give the same vectors. "load" is a fresh
interpreter from ``import hdruntime`` to a session, the files in the page cache and all their checksums compared. All
cases have the same number of threads.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from benchmarks.cpu.targets import Figure, Target, child_arguments, output_of, run_cases
from benchmarks.texts import HELP, tokenizer_of
from hdexport.bench.baselines.baseline import Texts
from hdexport.bench.measure.calls import timed, with_growth
from hdruntime.bundle.reader import open_bundle
from hdruntime.process_limits import chosen_threads

CALL_LENGTHS = (128, 1024)
CASES = (*(f"session {tokens}" for tokens in CALL_LENGTHS), "embed", "sentence-transformers", "load")
TARGETS = (
    Target("session 128", None, Figure.OVERHEAD, 1.03),
    Target("session 1024", None, Figure.OVERHEAD, 1.01),
    Target("embed", "sentence-transformers", Figure.LATENCY, 1 / 1.5),
    Target("load", None, Figure.LATENCY, 1500),
)
SAME_ANSWERS = {"embed": ("sentence-transformers", 1e-5)}
"""Largest difference of vectors of length 1; the two differ by 2e-7."""

_MODULE = "benchmarks.cpu.runtime_overhead"

_SHORTEST = 20
"""Tokens of a text, as of `--longest`: lengths are spread evenly on a logarithmic scale between them."""

_BATCH_SIZES = (1, 2, 4, 8, 32)
_LARGEST_BATCH = max(_BATCH_SIZES)
_CALL_TOKENS = 40_000
"""Tokens that each of the two calls of a case works on, over all its repetitions."""

_CHOOSE = "choose a batch size"
_WARM_UP_TEXTS = 8
_TEXTS_COMPARED = 50

# No code of ours measures here: it would import modules that `import hdruntime` then finds imported.
_LOAD = """
import json, sys, time

def memory_bytes(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

before_bytes, began, cpu_began = memory_bytes("VmRSS"), time.perf_counter(), time.process_time()
import hdruntime
session = hdruntime.load(sys.argv[1], "onnxruntime", threads=int(sys.argv[2]))
print(json.dumps({
    "latency_ms": (time.perf_counter() - began) * 1e3,
    "cpu_ms": (time.process_time() - cpu_began) * 1e3,
    "growth_bytes": memory_bytes("VmHWM") - before_bytes,
}))
"""


def main() -> int:
    """Run all cases, or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--longest", type=int, default=2000, help="tokens of a text")
    parser.add_argument("--positions", type=int, default=8192, help="that the model is extended to")
    parser.add_argument("--threads", type=int, default=chosen_threads()[0])
    parser.add_argument("--batch-size", type=int, help=argparse.SUPPRESS)
    return run_cases(_MODULE, parser, _measured, _comparison)


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    _make_models(options.models, options.positions)
    arguments = child_arguments(options)
    chosen = output_of(["-m", _MODULE, *arguments, "--case", _CHOOSE])
    return {
        "cases": CASES,
        "targets": TARGETS,
        "same_answers": SAME_ANSWERS,
        "arguments": [*arguments, f"--batch-size={chosen['batch_size']}"],
        **{name: getattr(options, name) for name in ("texts", "longest", "threads", "positions")},
        "bundle_bytes": sum(path.stat().st_size for path in (options.models / "bundle").iterdir()),
        "sentence_transformers": {"version": importlib.metadata.version("sentence-transformers"), **chosen},
    }


def mixed_texts(tokenizer_file: Path, *, number: int, longest: int) -> list[str]:
    """Chunks of Python's help, one after the other and again from the start, of about `_SHORTEST` to `longest` tokens.

    Args:
        longest: tokens, special ones included.
    """
    offsets = tokenizer_of(tokenizer_file).encode(HELP, add_special_tokens=False).offsets
    logarithms = np.random.default_rng(0).uniform(np.log(_SHORTEST), np.log(longest), number)
    texts: list[str] = []
    start = 0
    for tokens in np.exp(logarithms).astype(int) - 2:
        if start + tokens > len(offsets):
            start = 0
        texts.append(HELP[offsets[start][0] : offsets[start + tokens - 1][1]])
        start += tokens
    return texts


def _make_models(models: Path, positions: int) -> None:
    from hdexport.build import BuildOptions, build
    from hdexport.checkpoint import default_model
    from hdexport.extend import ExtendOptions, extend

    extend(ExtendOptions(model=default_model()[0], output=models / "checkpoint", max_len=positions))
    build(BuildOptions(model=models / "checkpoint", output=models / "bundle", max_len=positions, verify=None))


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    bundle, threads = options.models / "bundle", options.threads
    if options.case == "load":
        return output_of(["-c", _LOAD, str(bundle), str(threads)])
    if options.case.startswith("session"):
        return _call_overhead(bundle, int(options.case.split()[1]), threads=threads)
    texts = mixed_texts(bundle / "tokenizer.json", number=options.texts, longest=options.longest)
    if options.case == "embed":
        import hdruntime

        return _embedding_figures(hdruntime.load(bundle, "onnxruntime", threads=threads).embed, texts)
    encode = _sentence_transformer(options.models / "checkpoint", threads)
    if options.case == _CHOOSE:
        return _fastest_batch_size(encode, texts)
    return _embedding_figures(lambda some: encode(some, options.batch_size), texts)


def _call_overhead(bundle: Path, tokens: int, *, threads: int) -> dict[str, Any]:
    session, bare = _session_and_what_it_calls(bundle, threads)
    inputs = Texts(open_bundle(bundle)).batch(1, tokens)
    names = [output.name for output in bare.get_outputs()]
    return _interleaved(
        lambda: session(**inputs),
        lambda: dict(zip(names, bare.run(names, inputs), strict=True)),
        times=max(2, _CALL_TOKENS // tokens),
    )


def _session_and_what_it_calls(bundle: Path, threads: int) -> tuple[Any, Any]:
    """Another session of ONNX Runtime, even with the same options, would have its weights elsewhere in memory."""
    import onnxruntime

    import hdruntime

    created: list[Any] = []
    new_session = onnxruntime.InferenceSession

    def remember(*arguments: Any, **options: Any) -> Any:
        created.append(new_session(*arguments, **options))
        return created[-1]

    with mock.patch.object(onnxruntime, "InferenceSession", remember):
        session = hdruntime.load(bundle, "onnxruntime", threads=threads)
    return session, created[-1]


Call = Callable[[], dict[str, npt.NDArray[np.float32]]]


def _interleaved(call: Call, bare: Call, *, times: int) -> dict[str, Any]:
    """Figures of a call, and how many times as long it takes as the bare one."""
    for _ in range(3):
        ours, theirs = call(), bare()
    if any((ours[name] != theirs[name]).any() for name in theirs):
        sys.exit("The session's answer is not the bare call's.")
    runs, overheads = [], []
    for number in range(times):
        # The second finds the first one's leavings in the caches.
        if number % 2:
            expected_ms = timed(bare)[1]
            runs.append(timed(call)[1:])
        else:
            runs.append(timed(call)[1:])
            expected_ms = timed(bare)[1]
        overheads.append(runs[-1][0] / expected_ms)
    return {
        "latency_ms": statistics.median(latency_ms for latency_ms, _ in runs),
        "cpu_ms": statistics.median(cpu_ms for _, cpu_ms in runs),
        "growth_bytes": with_growth(call)[1],
        "overhead": statistics.median(overheads),
    }


def _sentence_transformer(checkpoint: Path, threads: int) -> Callable[[list[str], int], npt.NDArray[np.float32]]:
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    model = SentenceTransformer(str(checkpoint), device="cpu")
    return lambda texts, batch_size: model.encode(texts, batch_size=batch_size, show_progress_bar=False)


def _fastest_batch_size(encode: Callable[[list[str], int], object], texts: Sequence[str]) -> dict[str, Any]:
    """Measured on runs of neighbours in length, whose batches are as little padded as the batches of all texts."""
    by_length = sorted(texts, key=len)
    starts = range(_LARGEST_BATCH, len(by_length), 5 * _LARGEST_BATCH) if len(by_length) > _LARGEST_BATCH else [0]
    some = [text for start in starts for text in by_length[start : start + _LARGEST_BATCH]]
    encode(some[:_WARM_UP_TEXTS], 1)
    latencies_ms = {size: timed(functools.partial(encode, some, size))[1] for size in _BATCH_SIZES}
    return {"batch_size": min(latencies_ms, key=latencies_ms.__getitem__), "batch_size_latency_ms": latencies_ms}


def _embedding_figures(embed: Callable[[list[str]], npt.NDArray[np.float32]], texts: list[str]) -> dict[str, Any]:
    embed(texts[:_WARM_UP_TEXTS])
    (vectors, latency_ms, cpu_ms), growth_bytes = with_growth(lambda: timed(lambda: embed(texts)))
    return {
        "latency_ms": latency_ms,
        "cpu_ms": cpu_ms,
        "growth_bytes": growth_bytes,
        "answer": vectors[:: max(1, len(texts) // _TEXTS_COMPARED)].ravel().tolist(),
    }


if __name__ == "__main__":
    sys.exit(main())
