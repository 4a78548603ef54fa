"""Jobs that are killed at random moments: the same command continues, and the output is the undisturbed one's.

Usage: python -m benchmarks.reliability.kills [--jobs 12] [--kills 3] [--rows 1500] [--seed 0] [--output FILE]

Each job is `hdexport run` of the same rows, to JSON Lines, Parquet or NumPy in turns, killed (SIGKILL or SIGINT) a
random time after it starts, and started again, until it ends. Its output must equal an undisturbed job's, byte for
byte, and no file may stay but the record that the job is done. Of every other job, a kept file is damaged after the
first kill that leaves one: the next command continues, and the output is equal all the same, or it refuses the job by
name, and --restart helps.
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
from benchmarks.reliability.damage import DAMAGES
from benchmarks.reliability.sample import sample_bundle, texts
from hdruntime.jobs.state_folder import JOB_FILE, LOCK_FILE, MANIFEST_FILE, state_folder_path

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
            output = folder / str(number) / f"out{ending}"
            output.parent.mkdir()
            damaged = ""
            for _ in range(options.kills):
                job = _start(bundle, rows, output)
                try:
                    job.wait(timeout=rng.uniform(0.1, 1.1) * seconds)
                    break
                except subprocess.TimeoutExpired:
                    job.send_signal(rng.choice([signal.SIGKILL, signal.SIGINT]))
                    job.wait()
                    found["kills"] += 1
                if number % 2 and not damaged:
                    damaged = damage_kept_file(output, rng)
                    found["damaged"] += bool(damaged)
            job = _start(bundle, rows, output)
            _, said = job.communicate()
            if job.returncode and damaged:
                found["refused"] += 1
                if why := unfit_refusal(said, output):
                    wrong.append(f"job {number}, {damaged}: {why}")
                _start(bundle, rows, output, "--restart").wait()
            is_equal = output.is_file() and output.read_bytes() == expected[ending]
            state = state_folder_path(output)
            record = {state / name for name in (JOB_FILE, MANIFEST_FILE, LOCK_FILE)}
            left = [path.name for path in output.parent.rglob("*") if path not in {output, state, *record}]
            found["equal"] += is_equal and not left
            if not is_equal or left:
                wrong.append(f"job {number}, {damaged or 'not damaged'}: equal {is_equal}, left {left}")
    show(options.output, module="benchmarks.reliability.kills", jobs=options.jobs, wrong=wrong, **found)
    return 1 if wrong else 0


def damage_kept_file(output: Path, rng: random.Random) -> str:
    """Damage a file that an unfinished job keeps; says which and how, nothing without such a file."""
    files = [path for path in sorted(state_folder_path(output).glob("*")) if path.name != LOCK_FILE]
    files = [path for path in files if path.is_file() and path.stat().st_size]
    if not files:
        return ""
    file, kind = rng.choice(files), rng.choice(sorted(DAMAGES))
    DAMAGES[kind](file, rng)
    return f"{kind} of {file.name}"


def unfit_refusal(said: str, output: Path) -> str:
    """Return the fault of the message of a job that refuses damaged files, or an empty string."""
    if "Traceback" in said:
        return "a traceback"
    if str(state_folder_path(output)) not in said:
        return "no folder is named"
    return "" if "--restart" in said.splitlines()[-1] else "no next step"


def _start(bundle: Path, rows: Path, output: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hdexport", "run", str(bundle), str(rows), "-o", str(output), "--threads", "1"]
    command += ["--progress", "none", *flags]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


if __name__ == "__main__":
    sys.exit(main())
