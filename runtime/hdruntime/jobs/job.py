"""A batch job: planned, so that all that can be known is known before it starts, and run."""

from __future__ import annotations

__all__ = ["Job", "JobOptions", "plan_job", "run_job"]

import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputChangedError, InputError
from hdruntime.jobs.files import damaged
from hdruntime.jobs.folder import (
    JobFolder,
    check_job_folder,
    has_job_folder,
    opened_job_folder,
    tidy_job_folder,
    was_published,
)
from hdruntime.jobs.identity import Identity, identity_of_bundle, identity_of_inputs
from hdruntime.jobs.input_files import InputFile, find_inputs, integer_ids
from hdruntime.jobs.input_watch import InputWatch
from hdruntime.jobs.progress import JobProgress, JobState, ProgressMeter
from hdruntime.jobs.receipt import has_receipt, receipt_of
from hdruntime.jobs.results import Pairs, TaskResults, results_of_bundle
from hdruntime.jobs.row_reader import read_rows
from hdruntime.jobs.rows import Columns
from hdruntime.jobs.saved import Saved
from hdruntime.jobs.windows import Window, WindowOptions, WindowPool, cut_windows
from hdruntime.jobs.writers import ResultEncoding, check_output, encoding_of_output
from hdruntime.text.tokenization import Overflow


@dataclass(frozen=True, kw_only=True)
class JobOptions(WindowOptions):
    """How a job reads, batches and writes.

    Attributes:
        columns: where the rows' parts are.
        force: replace the output if it exists.
        restart: throw away what an unfinished job has kept, instead of going on with it.
    """

    columns: Columns = field(default_factory=Columns)
    force: bool = False
    restart: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that was found possible, made by `plan_job`.

    Attributes:
        files: its inputs, in order.
        output: what it writes.
        options: how.
        task: what it writes of a row.
        fields: the output's columns: id, the task's, tokens, error.
        identity: what another run has to have in common with it to go on with it.
        done: what it did, if it is done already: its output is there.
    """

    files: tuple[InputFile, ...]
    output: Path
    options: JobOptions
    task: TaskResults
    fields: tuple[pa.Field, ...]
    identity: Identity
    done: Saved | None

    def done_already(self) -> JobProgress | None:
        """What the job did, if it is done already."""
        if self.done is None:
            return None
        meter = ProgressMeter(
            self.files, counts=self.done.counts, position=self.done.position, seconds=self.done.seconds
        )
        return meter.progress(JobState.FINISHING, self.done.counts, self.done.position)


def plan_job(bundle: Bundle, inputs: Sequence[Path], output: Path, *, options: JobOptions | None = None) -> Job:
    """Check all that can be known before a session is loaded or a row is read.

    Args:
        bundle: what will run.
        inputs: files (.jsonl, .parquet, .txt) and directories of such files.
        output: a .jsonl or .parquet file.
        options: how; default `JobOptions()`.

    Raises:
        InputError: an input, a column or an option does not fit the bundle's task, or an unfinished job of other
            inputs or options is kept for this output.
        OutputExistsError: the output is there and may not be replaced, or another process is writing it.
        HdexportError: what an unfinished job keeps is damaged, or not in a folder of this user's.
    """
    options = options or JobOptions()
    options.check()
    tidy_job_folder(output)
    # What this very job may have put there is looked at below, when it is known which job it is.
    has_folder = has_job_folder(output)
    check_output(output, force=options.force or has_folder or has_receipt(output))
    task = results_of_bundle(bundle, tokenized=options.columns.input_ids is not None)
    _check_options(bundle.manifest.task, task, options)
    files = find_inputs(inputs, columns=options.columns)
    if any(file.path.resolve() == output.resolve() for file in files):
        raise InputError(f"{output} is an input as well as the output.\nChoose another place with -o.")
    fields = _fields(task, files, options.columns)
    identity = _identity(bundle, files, fields, options)
    done = None if options.force or options.restart or has_folder else receipt_of(output, identity)
    if options.restart or not (done or was_published(output, identity)):
        check_output(output, force=options.force)
    if not options.restart:
        check_job_folder(output, identity)
    return Job(
        files=tuple(files), output=output, options=options, task=task, fields=fields, identity=identity, done=done
    )


def run_job(job: Job, pool: WindowPool, *, on_progress: Callable[[JobProgress], None] | None = None) -> JobProgress:
    """Run a job, or go on with it: a row in, a row out, in order.

    The columns are ``id``, the task's, ``tokens`` and ``error``. A row that cannot be read, tokenised or run
    has the reason in ``error`` and no values, and the job goes on.

    Args:
        job: what `plan_job` made.
        pool: sessions of the bundle that the job was planned for.
        on_progress: called when the job begins or goes on, after every window, and when all rows are done.

    Returns:
        what the job did, the rows that were done before it went on included; also where it was done already, and there
        is nothing to do.

    Raises:
        InputError: a file cannot be read on, or has no rows; or as `plan_job`.
        InputChangedError: an input is not what it was when the job was planned, or when an earlier process read it.
        OutputExistsError: the output appeared meanwhile, or another process is writing it.
        BackendError: the backend fails on rows that it had run before, so it is not the rows' fault.
        HdexportError: the output cannot be written, or somebody has removed what is kept of it.
        Whatever is raised, there is no output then, or the one that was there before; the rows that are done are kept,
        and the same job goes on after them.
    """
    done = job.done_already()
    if done is not None:
        return done
    encoding = encoding_of_output(job.output, job.fields)
    report = on_progress or _ignore
    with opened_job_folder(job.output, job.identity, restart=job.options.restart) as folder:
        saved = folder.saved
        if saved.position.file >= len(job.files):
            raise damaged(folder.path, f"it went on in input {saved.position.file + 1} of {len(job.files)}")
        meter = ProgressMeter(job.files, counts=saved.counts, position=saved.position, seconds=saved.seconds)
        if not saved.complete:
            report(meter.progress(JobState.RUNNING, saved.counts, saved.position))
            _run_windows(job, pool, folder, encoding, meter, report)
            folder.complete()
        saved = folder.saved
        report(meter.progress(JobState.FINISHING, saved.counts, saved.position))
        folder.publish(encoding, force=job.options.force)
    return meter.progress(JobState.FINISHING, saved.counts, saved.position)


def _run_windows(
    job: Job,
    pool: WindowPool,
    folder: JobFolder,
    encoding: ResultEncoding,
    meter: ProgressMeter,
    report: Callable[[JobProgress], None],
) -> None:
    watch = InputWatch(job.files, job.options.columns)
    _require_unchanged(watch.change_since(folder.saved.position, folder.saved.stamp), folder)
    for window, result in pool.map(_windows_of(job, pool.window_characters, watch, folder)):
        _require_unchanged(watch.change(folder.saved.position, window.rows), folder)
        data = encoding.encode(result.results)
        if not folder.saved.result_bytes:
            data = encoding.begin() + data
        counts = folder.saved.counts + result.counts
        stamp = watch.stamp(window.end.file)
        folder.append(data, position=window.end, stamp=stamp, counts=counts, seconds=meter.seconds)
        folder.commit_if_due()
        report(meter.progress(JobState.RUNNING, counts, window.end))
    _require_unchanged(watch.final_change(folder.saved.position), folder)


def _windows_of(job: Job, characters: int, watch: InputWatch, folder: JobFolder) -> Iterator[Window]:
    """The windows that are left of a job, of inputs that have not changed while they were read."""
    start = folder.saved.position
    rows = read_rows(job.files, columns=job.options.columns, start=start)
    try:
        for window in cut_windows(rows, characters=characters):
            _require_unchanged(watch.change(start, window.rows), folder)
            yield window
            start = window.end
    except InputChangedError:
        raise
    except InputError:
        # That it changed may be why it cannot be read on.
        _require_unchanged(watch.change_of_files(), folder)
        raise


def _require_unchanged(change: str | None, folder: JobFolder) -> None:
    if change is None:
        return
    rows = folder.saved.counts.rows
    kept = "No row is kept. Run the same command again when nothing writes to its inputs, or on copies of them."
    if rows:
        kept = (
            f"{rows} rows are kept in {folder.path}, of what it was: put that back, time of change included, and the "
            "same command goes on after them. Or start over with what is there now: --restart"
        )
    raise InputChangedError(f"{change}.\n{kept}")


def _check_options(task: str, results: TaskResults, options: JobOptions) -> None:
    columns = options.columns
    if options.overflow is Overflow.SPLIT and columns.input_ids is not None:
        raise InputError(
            "Rows of ids are not split: which of them every piece needs is unknown.\n"
            "Give texts, split them yourself, or cut them: --overflow truncate"
        )
    if options.overflow is Overflow.SPLIT and not results.splits:
        raise InputError(f"The bundle's task is {task}, whose texts are not split.\nCut them: --overflow truncate")
    if columns.input_ids is not None and columns.text_pair is not None:
        raise InputError("A row has texts or --input-ids-column, not both.\nLeave out --text-pair-column.")
    if columns.input_ids is not None:
        return
    if results.pairs is Pairs.REQUIRED and columns.text_pair is None:
        raise InputError(
            f"The bundle's task is {task}: a row needs two texts, a question and its context.\n"
            "Name their columns: --text-column question --text-pair-column context"
        )
    if results.pairs is Pairs.REFUSED and columns.text_pair is not None:
        raise InputError(f"The bundle's task is {task}, which reads one text.\nLeave out --text-pair-column.")


def _fields(task: TaskResults, files: Sequence[InputFile], columns: Columns) -> tuple[pa.Field, ...]:
    return (
        pa.field("id", pa.int64() if integer_ids(files, columns=columns) else pa.string()),
        *task.fields,
        pa.field("tokens", pa.int32()),
        pa.field("error", pa.string()),
    )


def _identity(bundle: Bundle, files: Sequence[InputFile], fields: Sequence[pa.Field], options: JobOptions) -> Identity:
    columns = options.columns
    return {
        "the version of hdexport": importlib.metadata.version("hdexport"),
        "bundle": identity_of_bundle(bundle.manifest),
        "--text-column": columns.text,
        "--text-pair-column": columns.text_pair,
        "--id-column": columns.id,
        "--input-ids-column": columns.input_ids,
        "--overflow": options.overflow.value,
        "--stride": options.stride,
        "--split-pooling": options.split_pooling.value,
        "inputs": identity_of_inputs(files),
        "columns of the output": [str(field) for field in fields],
    }


def _ignore(progress: JobProgress) -> None:
    del progress
