"""A planned batch job, and running it."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from hdruntime.errors import InputChangedError, Message, Writer
from hdruntime.inference.overlapping import run_behind
from hdruntime.jobs.arriving import ArrivingInput, ArrivingShards
from hdruntime.jobs.identity import Identity
from hdruntime.jobs.input_files import InputFile
from hdruntime.jobs.input_search import FIRST_ROWS
from hdruntime.jobs.input_watch import InputWatch
from hdruntime.jobs.options import JobOptions
from hdruntime.jobs.output import STDOUT, LocalOutput, StandardOutput
from hdruntime.jobs.progress import JobManifest, JobProgress, JobState, ProgressMeter
from hdruntime.jobs.results import Results
from hdruntime.jobs.row_reader import read_rows
from hdruntime.jobs.shards import JobPool, PartialShard, Shard, ShardResult
from hdruntime.jobs.state_folder import START_OVER, damaged
from hdruntime.jobs.vectors import Ranges, Vectors
from hdruntime.jobs.writers import encoding_of
from hdruntime.tasks.task import TextTask
from hdruntime.text.ranges import RANGES_KEY

logger = logging.getLogger(__name__)

_NEW_OBJECTS = 200_000
"""Objects of a few shards of short rows; after so many new ones, the garbage collector looks at them."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that can run, made by `plan_job`.

    Attributes:
        files: inputs that have rows, in order.
        without_rows: the other inputs, which do not belong to the job's identity.
        destination: output of the job.
        options: options, with the columns of the inputs and the model's number of dimensions resolved.
        task: task whose results are computed for each row.
        fields: columns of the output: id, kept columns, columns of the task, tokens, error.
        metadata: metadata of the output, for formats that can hold it.
        identity: identity of the job; a run of another identity does not continue it.
        finished: manifest of the job if the job is done and its output is there; else None.
        ranges: float32 [2, dimensions], calibration ranges that were passed; None without any.
    """

    files: tuple[InputFile, ...]
    without_rows: tuple[InputFile, ...]
    destination: LocalOutput | StandardOutput
    options: JobOptions
    task: TextTask
    fields: tuple[pa.Field, ...]
    metadata: Mapping[str, str]
    identity: Identity
    finished: JobManifest | None
    ranges: Ranges | None = None

    @property
    def output(self) -> Path:
        """The file or directory that the job writes on this machine; ``-`` for the standard output."""
        return self.destination.path

    @property
    def done(self) -> JobProgress | None:
        """The job's outcome, if the job is done already and its output is there."""
        manifest = self.finished
        return None if manifest is None else ProgressMeter(self.files, manifest).progress(JobState.FINISHING, manifest)


def run_job(
    job: Job, pool: JobPool, *, on_progress: Callable[[JobProgress], None] | None = None, writer: Writer = str
) -> JobProgress:
    """Run a job, or continue it: one row out per row in, in order; with late chunking, one per chunk.

    The columns are ``id``, kept columns, and those of :func:`hdruntime.jobs.row_inference.fields_of_rows`. A row that
    cannot be read, tokenized or run has the reason in ``error`` and no values, and the job continues.

    If an error is raised, the output is absent or unchanged; finished rows are kept, and the same job continues after
    them.

    Args:
        job: a job of `plan_job`.
        pool: sessions of the bundle that the job was planned for.
        on_progress: called when the job begins or continues, after every shard, on a CPU about every two seconds
            within a shard, and when all rows are done.
        writer: writes the parameters that a row's error names; default: as Python does.

    Returns:
        the job's outcome, including rows of earlier runs, also if the job was done already.

    Raises:
        InputError: a file cannot be read to its end; or as `plan_job`.
        InputChangedError: an input has changed since the job was planned, or since an earlier process read it.
        OutputExistsError: the output has appeared meanwhile, or another process is writing it.
        BackendError: the backend fails on rows that it has run before, so the rows are not the cause.
        HdexportError: the output cannot be written, or the job's state folder was changed.
        BrokenPipeError: the reader of the standard output is gone.
    """
    done = job.done or _run(job, pool, on_progress or (lambda progress: None), writer)
    job.destination.upload()
    return done


def _run(job: Job, pool: JobPool, report: Callable[[JobProgress], None], writer: Writer) -> JobProgress:
    encoding = encoding_of(job.destination.format, job.fields)
    with job.destination.opened(job.identity, encoding, restart=job.options.restart) as results:
        manifest = results.manifest
        if manifest.position.file >= len(job.files):
            raise damaged(results.path, f"it continues in input {manifest.position.file + 1} of {len(job.files)}")
        meter = ProgressMeter(job.files, manifest)
        if manifest.output is None:
            report(meter.progress(JobState.RUNNING, manifest))
            try:
                _run_shards(job, pool, results, meter, report, writer)
            except InputChangedError as change:
                raise InputChangedError(*change.args, hint=_hint_after_change(results)) from None
            results.complete()
        done = results.manifest
        report(meter.progress(JobState.FINISHING, done))
        metadata = dict(job.metadata)
        if results.ranges is not None:
            metadata[RANGES_KEY] = json.dumps(results.ranges.tolist())
        results.publish(force=job.options.force, metadata=metadata)
    if done.counts.dropped_columns:
        logger.warning(
            "the output lacks columns that no JSON object among the first %d rows of its file has by a valid name: %s; "
            "to keep them, add them to one of those rows, for example as null",
            FIRST_ROWS,
            # A log is a file of UTF-8, which takes no half of a surrogate pair.
            ", ".join(done.counts.dropped_columns).encode(errors="backslashreplace").decode(),
        )
    return meter.progress(JobState.FINISHING, done)


def _run_shards(
    job: Job,
    pool: JobPool,
    results: Results,
    meter: ProgressMeter,
    report: Callable[[JobProgress], None],
    writer: Writer,
) -> None:
    ranges = job.ranges if results.ranges is None else results.ranges
    vectors = Vectors(job.options.vectors, ranges, chunked=job.options.late_chunking is not None)
    watch = InputWatch(job.files, job.options.columns, without_rows=job.without_rows)
    start = results.manifest.position

    def save(computed: tuple[Shard, ShardResult]) -> JobManifest:
        shard, result = computed
        watch.require_unchanged(results.manifest.position, shard.rows)
        result = vectors.finish(result).written(writer)
        if vectors.ranges is not results.ranges and vectors.ranges is not None:
            results.keep_ranges(vectors.ranges)
        rows = [row for row in result.results if not (job.options.skip_failed and row["error"])]
        counts = results.manifest.counts + result.counts
        results.add(rows, position=shard.end, counts=counts, seconds=meter.seconds)
        return results.manifest

    def with_partials(shards: Iterator[Shard]) -> Iterator[Shard]:
        """The shards, whose finished rows are kept while a shard runs; an earlier process may have begun the first."""
        earlier = results.earlier_partial()
        for shard in shards:
            # Shards beside a GPU take a second or two, and several are in work.
            on_partial = None if pool.computes_beside else functools.partial(keep_partial, shard)
            yield replace(shard, earlier=earlier, on_partial=on_partial)
            earlier = None

    def keep_partial(shard: Shard, partial: PartialShard) -> None:
        watch.require_unchanged(results.manifest.position, shard.rows)
        results.add_partial(partial, end=shard.end, seconds=meter.seconds)
        report(meter.progress(JobState.RUNNING, results.manifest))

    with contextlib.ExitStack() as exits:
        source, *_ = [file.source for file in job.files]
        if isinstance(source, ArrivingInput):
            rows = read_rows(job.files, columns=job.options.columns)
            arriving = ArrivingShards(rows, source, characters=pool.shard_characters)
            exits.callback(arriving.stop)
            shards: Iterator[Shard] = arriving
        else:
            shards = with_partials(watch.shards(start, characters=pool.shard_characters))
        exits.enter_context(_rare_garbage_collection())
        computed = exits.enter_context(contextlib.closing(pool.map(shards)))
        for manifest in run_behind(save, computed) if pool.computes_beside else map(save, computed):
            report(meter.progress(JobState.RUNNING, manifest))
    watch.require_all_unchanged()


@contextlib.contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Rows are many objects without circles, among which Python's garbage collector would search again and again."""
    thresholds = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _hint_after_change(results: Results) -> Message:
    """What is kept and what to do when an input has changed."""
    rows = results.manifest.all_counts.rows
    if not rows or results.path == STDOUT:
        printed = f"{rows} rows were printed; they belong to the old content. " if rows else "No row is kept. "
        return f"{printed}Run the same command again when no program writes to its inputs, or on copies of them."
    return (
        f"{rows} rows are kept in {results.path}; they belong to the old content. Restore the file with its "
        "modification time, and the same command continues after them. ",
        *START_OVER,
    )
