"""Embed the texts of a Parquet file and search them with NumPy.

    python examples/search.py BUNDLE

BUNDLE gives embeddings: `hdexport build --max-len 4096 -o BUNDLE` makes one of the sample model. The texts are the
topics of Python's own help, a quarter of which have more than 2000 tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import hdruntime
from hdruntime.jobs import JobOptions, JobProgress, LocalPool, plan_job, run_job
from hdruntime.text.tokenization import Overflow


def embed(bundle: Path, texts: Path, vectors: Path) -> None:
    """Embed the column `text` of a Parquet file.

    Args:
        bundle: a bundle that gives embeddings.
        texts: Parquet with the columns `id` and `text`.
        vectors: Parquet to write, with the columns `id`, `embedding`, `tokens` and `error`, without texts that fail.
    """
    options = JobOptions(overflow=Overflow.TRUNCATE, skip_failed=True)
    job = plan_job(hdruntime.open_bundle(bundle), [texts], vectors, options=options)
    with hdruntime.load(bundle) as session:
        done = run_job(job, LocalPool(session, job.task, options=job.options), on_progress=show)
    print(f"{done.rows} texts, {done.tokens} tokens, {done.failed_rows} failed")


def show(progress: JobProgress) -> None:
    """Show how many texts are done."""
    print(f"{progress.rows} texts", file=sys.stderr)


def search(bundle: Path, vectors: Path, question: str, *, nearest: int = 5) -> list[tuple[str, float]]:
    """The ids whose texts are nearest to a question, and their cosines, best first."""
    table = pq.read_table(vectors)
    matrix = np.stack(table["embedding"].to_numpy())  # [texts, dimensions]
    with hdruntime.load(bundle) as session:
        (query,) = session.embed([question])
    scores = matrix @ query / (np.linalg.norm(matrix, axis=1) * np.linalg.norm(query))
    return [(table["id"][int(row)].as_py(), float(scores[row])) for row in np.argsort(-scores)[:nearest]]


def main() -> None:
    """Embed the topics of Python's help and answer a question."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--question", default="How can a class inherit from two others?")
    arguments = parser.parse_args()
    with TemporaryDirectory() as directory:
        texts, vectors = Path(directory, "topics.parquet"), Path(directory, "vectors.parquet")
        pq.write_table(pa.table({"id": list(topics), "text": list(topics.values())}), texts)
        embed(arguments.bundle, texts, vectors)
        print(f"\n{arguments.question}")
        for topic, score in search(arguments.bundle, vectors, arguments.question):
            print(f"  {score:.3f}  {topic}")


if __name__ == "__main__":
    main()
