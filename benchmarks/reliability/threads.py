"""A session that many threads use: each text has the embedding that it has alone.

Usage: python -m benchmarks.reliability.threads [--threads 16] [--texts 4096] [--seconds 60] [--output FILE]

Threads embed calls of 1 to 64 texts, tokenize, and run arrays, all at a time, for so many seconds or texts.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np

import hdruntime
from benchmarks.record import show
from benchmarks.reliability.sample import sample_bundle, texts

_ATOL = 1e-6


def main() -> int:
    """Embed alone, then together, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--texts", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    sample = texts(64, longest=60)
    errors, failures, done = [0.0], [], [0]
    lock, until = threading.Lock(), time.monotonic() + options.seconds
    with sample_bundle() as bundle, hdruntime.load(bundle, "onnxruntime") as session:
        alone = np.concatenate([session.embed([text]) for text in sample])

        def work(seed: int) -> None:
            rng = random.Random(seed)
            try:
                while time.monotonic() < until and done[0] < options.texts:
                    picked = [rng.randrange(len(sample)) for _ in range(rng.choice([1, 2, 7, 64]))]
                    if rng.random() < 0.2:
                        session.tokenize([sample[index] for index in picked])
                        session(input_ids=[[101, 2000, 102]])
                    found = session.embed([sample[index] for index in picked])
                    error = float(np.abs(found - alone[picked]).max())
                    with lock:
                        errors[0], done[0] = max(errors[0], error), done[0] + len(picked)
            except BaseException as error:
                failures.append(repr(error))

        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(options.threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    figures = {"threads": options.threads, "texts": done[0], "max_abs_error": errors[0], "failures": failures}
    show(options.output, module="benchmarks.reliability.threads", **figures)
    return 1 if failures or errors[0] > _ATOL else 0


if __name__ == "__main__":
    sys.exit(main())
