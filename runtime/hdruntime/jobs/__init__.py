"""Batch jobs: files of texts in, a file of results out, in order, in bounded memory, with errors of invalid rows.

A job may be stopped at any moment; the same job, run again, continues: see :mod:`hdruntime.jobs.state_folder`.

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

from hdruntime.jobs.job import Job, run_job
from hdruntime.jobs.options import JobOptions, RowOptions
from hdruntime.jobs.plan import plan_job
from hdruntime.jobs.progress import JobProgress
from hdruntime.jobs.row_inference import LocalPool
from hdruntime.jobs.rows import Columns
from hdruntime.jobs.vectors import VectorOptions
