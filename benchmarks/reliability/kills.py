"""Jobs that are killed at random moments: the same command continues, and the output is the undisturbed one's.

Usage: python -m benchmarks.reliability.kills [--jobs 12] [--kills 3] [--rows 1500] [--seed 0] [--output FILE]

Each job is `hdexport run` of the same rows, to JSON Lines, Parquet or NumPy in turns, killed (SIGKILL or SIGINT) a
random time after it starts, and started again, until it ends. Its output must equal an undisturbed job's, byte for
byte, and no file of the job may stay.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.record import show
from benchmarks.reliability.sample import sample_bundle, texts

_ENDINGS = (".jsonl", ".parquet", ".npy")


def main() -> int:
    """Run undisturbed, then disturbed, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--kills", type=int, default=3, help="of each job, at most")
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rng, found, wrong = random.Random(options.seed), Counter(), []
    with sample_bundle() as bundle, tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = folder / "rows.jsonl"
        lines = (json.dumps({"id": index, "text": text}) for index, text in enumerate(texts(options.rows, longest=30)))
        rows.write_text("".join(f"{line}\n" for line in lines))
        expected, seconds = {}, 0.0
        for ending in _ENDINGS:
            began = time.monotonic()
            _start(bundle, rows, folder / f"undisturbed{ending}").wait()
            seconds = time.monotonic() - began
            expected[ending] = (folder / f"undisturbed{ending}").read_bytes()
        for number in range(options.jobs):
            ending = _ENDINGS[number % len(_ENDINGS)]
            output = folder / "jobs" / f"{number}{ending}"
            output.parent.mkdir(exist_ok=True)
            for _ in range(options.kills):
                job = _start(bundle, rows, output)
                try:
                    job.wait(timeout=rng.uniform(0.1, 1.1) * seconds)
                    break
                except subprocess.TimeoutExpired:
                    job.send_signal(rng.choice([signal.SIGKILL, signal.SIGINT]))
                    job.wait()
                    found["kills"] += 1
            _start(bundle, rows, output).wait()
            is_equal = output.is_file() and output.read_bytes() == expected[ending]
            left = [path.name for path in output.parent.iterdir() if path != output]
            found["equal"] += is_equal and not left
            if not is_equal or left:
                wrong.append(f"job {number}: equal {is_equal}, left {left}")
            output.unlink(missing_ok=True)
    show(options.output, module="benchmarks.reliability.kills", jobs=options.jobs, wrong=wrong, **found)
    return 1 if wrong else 0


def _start(bundle: Path, rows: Path, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hdexport", "run", str(bundle), str(rows), "-o", str(output), "--threads", "1"]
    return subprocess.Popen([*command, "--progress", "none"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
