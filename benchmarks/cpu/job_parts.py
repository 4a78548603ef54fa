"""Where the time of a batch job of short texts goes on a CPU: reading, tokenizing, computing, writing, the rest.

Usage: python -m benchmarks.cpu.job_parts BUNDLE [--texts 3000] [--longest 64] [--threads 2]

Texts of 8 to --longest tokens, evenly spread, from a JSON Lines file into a Parquet file: the job of `hdexport run` in
this process, with clocks around its parts; imports are over. Computing is the backend's run alone; it should take at
least 90 % of the wall time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa

import hdruntime
from benchmarks.texts import HELP
from hdruntime.jobs import LocalPool, input_watch, plan_job, run_job
from hdruntime.jobs.output import JobFolder
from hdruntime.jobs.writers import ResultEncoding
from hdruntime.tasks.text_inference import TextInference

_LEAST_TOKENS = 8
_TOKENS_OF_A_WORD = 1.9
_LEAST_SHARE = 0.9

seconds: Counter[str] = Counter()


def main() -> int:
    """Run the job, and print the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--texts", type=int, default=3000)
    parser.add_argument("--longest", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    timed_rows = mock.patch.object(input_watch, "read_rows", _timed_rows(input_watch.read_rows))
    with tempfile.TemporaryDirectory() as folder, timed_rows:
        texts = Path(folder) / "texts.jsonl"
        texts.write_text("\n".join(json.dumps({"text": text}) for text in _texts(options.texts, options.longest)))
        planned = plan_job(hdruntime.open_bundle(options.bundle), [texts], Path(folder) / "vectors.parquet")
        with hdruntime.load(options.bundle, threads=options.threads) as session:
            session.embed(["warm"] * 8)
            # The first array of Arrow imports pandas where that is installed: half a second of each process.
            pa.array([0])
            runner = next(each for each in type(session._scheduler.runner).mro() if "run" in vars(each))
            parts = ((runner, "run", "computing"), (TextInference, "encode", "tokenizing"))
            parts += ((ResultEncoding, "encode", "writing"), (JobFolder, "append", "writing"))
            parts += ((JobFolder, "commit_if_due", "writing"), (JobFolder, "publish", "making the file"))
            for owner, name, part in parts:
                for each in (owner, *owner.__subclasses__()):
                    if name in vars(each):
                        setattr(each, name, _timed(getattr(each, name), part))
            began = time.perf_counter()
            done = run_job(planned, LocalPool(session, planned.task, options=planned.options))
            total = time.perf_counter() - began
    seconds["scheduling and the rest"] = total - seconds.total()
    print(f"{done.rows} texts, {done.tokens} tokens in {total:.1f} s, {done.rows / total:.0f} texts/s")
    for part, took in seconds.most_common():
        print(f"{part:24} {took:7.2f} s  {took / total:6.1%}")
    return 0 if seconds["computing"] >= _LEAST_SHARE * total else 1


def _texts(count: int, longest: int) -> list[str]:
    words, draw = HELP.split(), np.random.default_rng(0)
    lengths = (draw.integers(_LEAST_TOKENS, longest + 1, count) / _TOKENS_OF_A_WORD).astype(int) + 1
    starts = draw.integers(0, len(words) - longest, count)
    return [" ".join(words[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


def _timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] += time.perf_counter() - began

    return timed


def _timed_rows(read_rows: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def rows(*args: Any, **kwargs: Any) -> Iterator[Any]:
        following = _timed(read_rows(*args, **kwargs).__next__, "reading")
        while True:
            try:
                yield following()
            except StopIteration:
                return

    return rows


if __name__ == "__main__":
    raise SystemExit(main())
