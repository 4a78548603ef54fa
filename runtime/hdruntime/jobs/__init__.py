"""Batch jobs: files of texts in, a file of results out, in order, in bounded memory, with errors of invalid rows.

A job may be stopped at any moment; the same job, run again, continues: see :mod:`hdruntime.jobs.output`.

::

    job = plan_job(bundle, [Path("texts.jsonl")], Path("vectors.parquet"))
    with hdruntime.load(bundle) as session:
        done = run_job(job, LocalPool(session, job.task, options=job.options))
"""

from __future__ import annotations

__all__ = [
    "Columns",
    "Job",
    "JobOptions",
    "JobProgress",
    "LocalPool",
    "RowOptions",
    "VectorOptions",
    "plan_job",
    "run_job",
]

from hdruntime.jobs.job import Job, JobOptions, plan_job, run_job
from hdruntime.jobs.progress import JobProgress
from hdruntime.jobs.rows import Columns
from hdruntime.jobs.shards import LocalPool, RowOptions
from hdruntime.jobs.vectors import VectorOptions
