"""A batch job from Python: rows that fail are marked, and a stopped job continues.

python examples/batch_job.py BUNDLE
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import hdruntime
from hdruntime.jobs import JobOptions, JobProgress, LocalPool, plan_job, run_job

ROWS = 200


def write_rows(path: Path) -> None:
    """Write JSON Lines, two rows of which cannot be embedded."""
    rows: list[dict[str, object]] = [{"id": row, "text": f"Document {row} says little. " * 8} for row in range(ROWS)]
    rows[3]["text"] = None
    rows[5]["text"] = "word " * 100_000
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run(bundle: Path, texts: Path, vectors: Path, *, stop_after: int | None = None) -> JobProgress:
    """Embed texts, or go on with a job that was stopped.

    Args:
        bundle: a bundle that gives embeddings.
        texts: JSON Lines.
        vectors: the file to write; it appears when all rows are done.
        stop_after: rows after which Ctrl-C is simulated.
    """

    def report(progress: JobProgress) -> None:
        print(f"  {progress.rows} rows done")
        if stop_after is not None and progress.rows >= stop_after:
            raise KeyboardInterrupt

    # Small batches, so that this small job has something left to do when it is stopped.
    job = plan_job(hdruntime.open_bundle(bundle), [texts], vectors, options=JobOptions(batch_tokens=256))
    with hdruntime.load(bundle) as session:
        return run_job(job, LocalPool(session, job.task, options=job.options), on_progress=report)


def main() -> None:
    """Start a job, stop it, and finish it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    bundle = parser.parse_args().bundle
    with TemporaryDirectory() as directory:
        texts, vectors = Path(directory, "texts.jsonl"), Path(directory, "vectors.jsonl")
        write_rows(texts)
        try:
            run(bundle, texts, vectors, stop_after=ROWS // 2)
        except KeyboardInterrupt:
            print(f"Stopped. {vectors.name} exists: {vectors.exists()}")
        done = run(bundle, texts, vectors)
        print(f"Done: {done.rows} rows, {done.resumed_rows} of them before the stop. Failed: {dict(done.errors)}")
        for row in map(json.loads, vectors.read_text(encoding="utf-8").splitlines()):
            if row["error"]:
                print(f"  row {row['id']}: {row['error'].splitlines()[0]}")


if __name__ == "__main__":
    main()
