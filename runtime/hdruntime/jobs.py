"""Batch jobs: files of texts in, a file of results out, in order, in bounded memory, bad rows marked."""

from __future__ import annotations

__all__ = ["Job", "JobOptions", "JobProgress", "plan_job", "run_job"]

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from hdruntime.bundle import Bundle
from hdruntime.errors import InputError
from hdruntime.results import Pairs, TaskResults, results_of_bundle
from hdruntime.rows import Columns, find_inputs, integer_ids, read_rows
from hdruntime.session import Session
from hdruntime.tokenization import Overflow
from hdruntime.windows import Item, WindowRunner
from hdruntime.writers import check_output, staged_results


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """How a job reads, batches and writes.

    Attributes:
        columns: where the rows' parts are.
        max_batch_tokens: most tokens of a batch, padding included; a longer row goes alone. None: what suits the
            backend.
        overflow: whether a row of too many tokens fails or is cut.
        force: replace the output if it exists.
    """

    columns: Columns = field(default_factory=Columns)
    max_batch_tokens: int | None = None
    overflow: Overflow = Overflow.ERROR
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that was found possible, made by `plan_job`."""

    files: tuple[Path, ...]
    output: Path
    options: JobOptions
    task: TaskResults


@dataclass(kw_only=True)
class JobProgress:
    """How far a job is; at its end, what it did.

    Attributes:
        rows: rows done, failed ones included.
        failed_rows: rows with an error.
        tokens: tokens of the rows that did not fail.
        seconds: time since the job began.
        first_error: id and error of a row that failed, the first that was noticed.
    """

    rows: int = 0
    failed_rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_error: str | None = None


def plan_job(bundle: Bundle, inputs: Sequence[Path], output: Path, *, options: JobOptions | None = None) -> Job:
    """Check all that can be known before a session is loaded or a row is read.

    Args:
        bundle: what will run.
        inputs: files (.jsonl, .parquet, .txt) and directories of such files.
        output: a .jsonl or .parquet file.
        options: how; default `JobOptions()`.

    Raises:
        InputError: an input, a column or an option does not fit the bundle's task.
        OutputExistsError: the output is there and may not be replaced.
    """
    options = options or JobOptions()
    if options.max_batch_tokens is not None and options.max_batch_tokens < 1:
        raise InputError(
            f"--max-batch-tokens {options.max_batch_tokens} is too small.\n"
            "Use 1 or more, or leave it out for what suits the backend."
        )
    check_output(output, force=options.force)
    task = results_of_bundle(bundle)
    _check_pairs(bundle.manifest.task, task.pairs, options.columns)
    files = find_inputs(inputs, columns=options.columns)
    if any(file.resolve() == output.resolve() for file in files):
        raise InputError(f"{output} is an input as well as the output.\nChoose another place with -o.")
    return Job(files=tuple(files), output=output, options=options, task=task)


def run_job(job: Job, session: Session, *, on_progress: Callable[[JobProgress], None] | None = None) -> JobProgress:
    """Run a job: a row in, a row out, in order.

    The columns are ``id``, the task's, ``tokens`` and ``error``. A row that cannot be read, tokenised or run
    has the reason in ``error`` and no values, and the job goes on.

    Args:
        job: what `plan_job` made.
        session: of the bundle that the job was planned for.
        on_progress: called after every batch with the one object that is returned at last.

    Raises:
        InputError: a file cannot be read on, or has no rows.
        BackendError: the backend fails on rows that it had run before, so it is not the rows' fault.
        HdexportError: the output cannot be written.
        Whatever is raised, there is no output then, or the one that was there before.
    """
    options = job.options
    began = time.monotonic()
    progress = JobProgress()
    runner = WindowRunner(session, job.task, max_batch_tokens=options.max_batch_tokens, overflow=options.overflow)
    integers = integer_ids(job.files, columns=options.columns)
    fields = [
        pa.field("id", pa.int64() if integers else pa.string()),
        *job.task.fields,
        pa.field("tokens", pa.int32()),
        pa.field("error", pa.string()),
    ]
    with staged_results(job.output, fields=fields, force=options.force) as writer:
        for window in runner.windows(read_rows(job.files, columns=options.columns)):
            for done in runner.infer(window):
                _count(done, progress)
                progress.seconds = time.monotonic() - began
                if on_progress is not None:
                    on_progress(progress)
            writer.write([_result(item, job.task) for item in window])
    progress.seconds = time.monotonic() - began
    return progress


def _check_pairs(task: str, pairs: Pairs, columns: Columns) -> None:
    if pairs is Pairs.REQUIRED and columns.text_pair is None:
        raise InputError(
            f"The bundle's task is {task}: a row needs two texts, a question and its context.\n"
            "Name their columns: --text-column question --text-pair-column context"
        )
    if pairs is Pairs.REFUSED and columns.text_pair is not None:
        raise InputError(f"The bundle's task is {task}, which reads one text.\nLeave out --text-pair-column.")


def _result(item: Item, task: TaskResults) -> dict[str, object]:
    values = item.values or dict.fromkeys(column.name for column in task.fields)
    tokens = None if item.encoding is None else len(item.encoding)
    return {"id": item.row.id, **values, "tokens": tokens, "error": item.error}


def _count(items: Sequence[Item], progress: JobProgress) -> None:
    progress.rows += len(items)
    for item in items:
        if item.encoding is not None and item.error is None:
            progress.tokens += len(item.encoding)
        else:
            progress.failed_rows += 1
            progress.first_error = progress.first_error or f"row {item.row.id}: {item.error}"
