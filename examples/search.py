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
from hdruntime.text.encoding import Overflow


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
    print(f"\rEmbedded {done.rows} texts, {done.tokens} tokens, {done.failed_rows} failed")


def show(progress: JobProgress) -> None:
    """Show how many texts are done, on one line of a terminal."""
    if sys.stderr.isatty():
        print(f"\r{progress.rows} texts", end="", file=sys.stderr)


def search(bundle: Path, vectors: Path, question: str) -> list[tuple[str, float]]:
    """All ids, the text nearest to a question first, and its cosine."""
    with hdruntime.load(bundle) as session:
        return _nearest(pq.read_table(vectors), session.embed([question])[0])


def alike(vectors: Path, name: str) -> list[tuple[str, float]]:
    """All other ids, the text nearest to that id's text first, and its cosine."""
    table = pq.read_table(vectors)
    row = table["id"].to_pylist().index(name)
    return _nearest(table, table["embedding"].to_numpy()[row])[1:]


def _nearest(table: pa.Table, query: np.ndarray) -> list[tuple[str, float]]:
    matrix = np.stack(table["embedding"].to_numpy())  # [texts, dimensions]
    scores = matrix @ query / (np.linalg.norm(matrix, axis=1) * np.linalg.norm(query))
    return [(table["id"][int(row)].as_py(), float(scores[row])) for row in np.argsort(-scores)]


def main() -> None:
    """Embed the topics of Python's help, answer a question, and find the topics that are like a long one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--question", default="How can a class inherit from two others?")
    parser.add_argument("--like", default="try", help="a topic (default: try, of about 2000 tokens)")
    arguments = parser.parse_args()
    with TemporaryDirectory() as directory:
        texts, vectors = Path(directory, "topics.parquet"), Path(directory, "vectors.parquet")
        pq.write_table(pa.table({"id": list(topics), "text": list(topics.values())}), texts)
        embed(arguments.bundle, texts, vectors)
        for title, found in (
            (arguments.question, search(arguments.bundle, vectors, arguments.question)),
            (f"Texts similar to {arguments.like!r}", alike(vectors, arguments.like)),
        ):
            print(title)
            print("  " + ", ".join(f"{topic} ({score:.3f})" for topic, score in found[:5]))


if __name__ == "__main__":
    main()
