"""A batch job: planned, with all checks that are possible before it starts, and run."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import pyarrow as pa

from hdruntime.backends.precision import Precision
from hdruntime.bundle.identity import identity_of_bundle
from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.sentence_settings import SentenceSettings
from hdruntime.errors import InputChangedError, InputError
from hdruntime.inference.overlapping import run_behind
from hdruntime.inference.streaming import checked_segment
from hdruntime.jobs.arriving import ArrivingInput, ArrivingShards, standard_input_arrives
from hdruntime.jobs.files import damaged
from hdruntime.jobs.identity import Identity, identity_of_inputs
from hdruntime.jobs.input_files import InputFile, RowFormat
from hdruntime.jobs.input_search import FIRST_ROWS, fields_of_columns, find_inputs, resolved_columns
from hdruntime.jobs.input_watch import InputWatch
from hdruntime.jobs.output import STDOUT, LocalOutput, Results, StandardOutput, output_at
from hdruntime.jobs.progress import JobProgress, JobState, ProgressMeter, Saved
from hdruntime.jobs.row_reader import read_rows
from hdruntime.jobs.rows import Columns
from hdruntime.jobs.shards import JobPool, Part, RowOptions, Shard, ShardResult
from hdruntime.jobs.vectors import COLUMN, Ranges, VectorOptions, Vectors, is_of_tokens
from hdruntime.jobs.writers import ResultFormat, encoding_of
from hdruntime.tasks.embedding import column_of_spans
from hdruntime.tasks.of_bundle import check_pairs, task_of_bundle
from hdruntime.tasks.task import TextTask
from hdruntime.tasks.text_inference import checked_streaming
from hdruntime.text.answers import AnswerOptions
from hdruntime.text.chunking import overlap_of
from hdruntime.text.encoding import Overflow
from hdruntime.text.lengths import checked_length
from hdruntime.text.ranges import BUNDLE_KEY, NORMALIZED_KEY, RANGES_KEY, read_ranges

logger = logging.getLogger(__name__)

_NEW_OBJECTS = 200_000
"""Objects of a few shards of short rows; after so many new ones, the garbage collector looks at them."""

_CHANGE_NOTHING = (
    *("batch_size", "batch_tokens", "force", "restart", "max_wait_ms"),
    # Others say what these are for.
    *("columns", "vectors", "answers", "spans_column", "keeps_all_column"),
)
"""Options that may differ where a job continues. All others belong to its identity, by their names."""


@dataclass(frozen=True, kw_only=True)
class JobOptions(RowOptions):
    """How a job reads, batches and writes.

    Attributes:
        columns: of the inputs.
        input_format: of all inputs; None: by the endings of their names.
        vectors: how vectors are written.
        skip_failed: leave failed rows out of the output.
        force: replace the output if it exists.
        restart: discard the rows that an unfinished job has kept, instead of continuing it.
        precision: the precision of the session that runs the job, as :func:`hdruntime.load` was asked for it. A job is
            not continued in another one.
        max_wait_ms: milliseconds that a row of the standard input waits for others before it is run, if results go to
            the standard output: rows are run while the standard input stays open. None: it is read to its end first.
    """

    columns: Columns = field(default_factory=Columns)
    input_format: RowFormat | None = None
    vectors: VectorOptions = field(default_factory=VectorOptions)
    skip_failed: bool = False
    force: bool = False
    restart: bool = False
    precision: Precision = Precision.AUTO
    max_wait_ms: int | None = None

    def check(self) -> None:
        super().check()
        if self.max_wait_ms is not None and self.max_wait_ms < 0:
            raise InputError(f"--max-wait-ms {self.max_wait_ms} is negative.", hint="Use 0 or more milliseconds.")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that can run, made by `plan_job`.

    Attributes:
        files: its inputs that have rows, in order.
        without_rows: the other inputs, which do not belong to its identity.
        destination: where it writes.
        options: with the columns of the inputs and the model's number of dimensions resolved.
        task: its results for a row.
        fields: the output's columns: id, kept columns, the task's, tokens, error.
        metadata: of the output, for formats that can hold it.
        identity: another run must have the same to continue it.
        finished: what was done, if the job is done already and its output is there.
        ranges: float32 [2, dimensions], the calibration ranges that were given; None without any.
    """

    files: tuple[InputFile, ...]
    without_rows: tuple[InputFile, ...]
    destination: LocalOutput | StandardOutput
    options: JobOptions
    task: TextTask
    fields: tuple[pa.Field, ...]
    metadata: Mapping[str, str]
    identity: Identity
    finished: Saved | None
    ranges: Ranges | None = None

    @property
    def output(self) -> Path:
        """The file or directory that the job writes on this machine; ``-`` for the standard output."""
        return self.destination.path

    @property
    def done(self) -> JobProgress | None:
        """The job's outcome, if it is done already and its output is there."""
        saved = self.finished
        return None if saved is None else ProgressMeter(self.files, saved).progress(JobState.FINISHING, saved)


def plan_job(
    bundle: Bundle, inputs: Sequence[str | Path], output: str | Path, *, options: JobOptions | None = None
) -> Job:
    """Do all checks that are possible before a session is loaded or a row is run.

    Args:
        bundle: the bundle that will run.
        inputs: files, directories, patterns and URLs, see `find_inputs`; ``-`` is the standard input, which is read
            here.
        output: a .jsonl, .parquet, .npy or .npz file; a name without an ending is a directory of Parquet files, and
            ``-`` the standard output. An output at a URL is written on this machine first.
        options: default `JobOptions()`.

    Raises:
        InputError: an input, a column or an option does not fit the bundle's task, or an unfinished job of other
            inputs or options is kept for this output.
        OutputExistsError: the output exists and may not be replaced, or another process is writing it.
        HdexportError: the folder of an unfinished job is damaged, or another user's.
    """
    options = options or JobOptions()
    options.check()
    destination = output_at(output)
    destination.check(force=options.force)
    tokenized = options.columns.input_ids is not None
    task = task_of_bundle(bundle, options, tokenized=tokenized)
    spans = None if options.late_chunking is None else column_of_spans(options.late_chunking)
    options = replace(options, columns=replace(options.columns, spans=spans))
    _check_options(task, options)
    prompt = options.chosen_prompt(task)
    found = find_inputs(
        inputs,
        columns=options.columns,
        input_format=options.input_format,
        spool=destination.spool,
        wait_seconds=(options.max_wait_ms or 0) / 1000 if rows_arrive(inputs, destination.path, options) else None,
    )
    if any(destination.holds(file.source.identity) for file in found):
        raise InputError(f"{destination.name} is an input as well as the output.", hint="Choose another place with -o.")
    files = [file for file in found if file.rows != 0]
    options = replace(
        options,
        columns=resolved_columns(options.columns, files),
        vectors=_vectors_of_model(options.vectors, bundle.manifest.sentence),
    )
    fields = _fields(task, files, options)
    _check_format(destination.format, fields, options)
    ranges = _given_ranges(bundle, options.vectors, fields)
    identity = _identity(bundle, task, files, fields, options, prompt, ranges)
    finished = destination.finished(identity, force=options.force, restart=options.restart)
    if finished is None and options.vectors.output_dtype.needs_ranges:
        destination.check_ranges(force=options.force)
    return Job(
        files=tuple(files),
        without_rows=tuple(file for file in found if file.rows == 0),
        destination=destination,
        options=options,
        task=task,
        fields=fields,
        metadata=_metadata(bundle, [field.name for field in fields], options, identity),
        identity=identity,
        finished=finished,
        ranges=ranges,
    )


def run_job(job: Job, pool: JobPool, *, on_progress: Callable[[JobProgress], None] | None = None) -> JobProgress:
    """Run a job, or continue it: one row out per row in, in order; with late chunking, one per chunk.

    The columns are ``id``, kept columns, the task's, ``tokens`` and ``error``. A row that cannot be read, tokenised or
    run has the reason in ``error`` and no values, and the job continues.

    If an error is raised, the output is absent or unchanged; finished rows are kept, and the same job continues after
    them.

    Args:
        job: from `plan_job`.
        pool: sessions of the bundle that the job was planned for.
        on_progress: called when the job begins or continues, after every shard, on a CPU about every two seconds
            within one, and when all rows are done.

    Returns:
        the job's outcome, including rows of earlier runs, also if it was done already.

    Raises:
        InputError: a file cannot be read to its end; or as `plan_job`.
        InputChangedError: an input has changed since the job was planned, or since an earlier process read it.
        OutputExistsError: the output has appeared meanwhile, or another process is writing it.
        BackendError: the backend fails on rows that it has run before, so the rows are not the cause.
        HdexportError: the output cannot be written, or its kept results were removed.
        BrokenPipeError: the reader of the standard output is gone.
    """
    done = job.done or _run(job, pool, on_progress)
    job.destination.upload()
    return done


def _run(job: Job, pool: JobPool, on_progress: Callable[[JobProgress], None] | None) -> JobProgress:
    encoding = encoding_of(job.destination.format, job.fields)
    report = on_progress or (lambda progress: None)
    with job.destination.opened(job.identity, encoding, restart=job.options.restart) as folder:
        saved = folder.saved
        if saved.position.file >= len(job.files):
            raise damaged(folder.path, f"it continues in input {saved.position.file + 1} of {len(job.files)}")
        meter = ProgressMeter(job.files, saved)
        if saved.output is None:
            report(meter.progress(JobState.RUNNING, saved))
            try:
                _run_shards(job, pool, folder, meter, report)
            except InputChangedError as change:
                raise InputChangedError(f"{change}.", hint=_kept(folder)) from None
            folder.complete()
        done = folder.saved
        report(meter.progress(JobState.FINISHING, done))
        metadata = dict(job.metadata)
        if folder.ranges is not None:
            metadata[RANGES_KEY] = json.dumps(folder.ranges.tolist())
        folder.publish(force=job.options.force, metadata=metadata)
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
    folder: Results,
    meter: ProgressMeter,
    report: Callable[[JobProgress], None],
) -> None:
    ranges = job.ranges if folder.ranges is None else folder.ranges
    vectors = Vectors(job.options.vectors, ranges, chunked=job.options.late_chunking is not None)
    watch = InputWatch(job.files, job.options.columns, without_rows=job.without_rows)
    start = folder.saved

    def save(computed: tuple[Shard, ShardResult]) -> Saved:
        shard, result = computed
        watch.require_unchanged(folder.saved.position, shard.rows)
        result = vectors.finish(result)
        if vectors.ranges is not folder.ranges and vectors.ranges is not None:
            folder.keep_ranges(vectors.ranges)
        rows = [row for row in result.results if not (job.options.skip_failed and row["error"])]
        folder.add(
            rows,
            position=shard.end,
            stamp=watch.stamp(shard.end.file),
            counts=folder.saved.counts + result.counts,
            seconds=meter.seconds,
        )
        return folder.saved

    def with_parts(shards: Iterator[Shard]) -> Iterator[Shard]:
        """The shards, whose rows are kept while a shard runs; the first may have rows of an earlier process."""
        done = folder.kept_part()
        for shard in shards:
            # Shards beside a GPU take a second or two, and several are in work.
            on_part = None if pool.computes_beside else functools.partial(keep_part, shard)
            yield replace(shard, done=done, on_part=on_part)
            done = None

    def keep_part(shard: Shard, part: Part) -> None:
        watch.require_unchanged(folder.saved.position, shard.rows)
        folder.add_part(part, end=shard.end, seconds=meter.seconds)
        report(meter.progress(JobState.RUNNING, folder.saved))

    with contextlib.ExitStack() as exits:
        source, *_ = [file.source for file in job.files]
        if isinstance(source, ArrivingInput):
            rows = read_rows(job.files, columns=job.options.columns)
            arriving = ArrivingShards(rows, source, characters=pool.shard_characters)
            exits.callback(arriving.stop)
            shards: Iterator[Shard] = arriving
        else:
            shards = with_parts(watch.shards(start.position, start.stamp, characters=pool.shard_characters))
        exits.enter_context(_seldom_collected())
        computed = exits.enter_context(contextlib.closing(pool.map(shards)))
        for saved in run_behind(save, computed) if pool.computes_beside else map(save, computed):
            report(meter.progress(JobState.RUNNING, saved))
    watch.require_all_unchanged(folder.saved.position)


@contextlib.contextmanager
def _seldom_collected() -> Iterator[None]:
    """Rows are many objects without circles, among which Python's garbage collector would search again and again."""
    thresholds = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _kept(folder: Results) -> str:
    """What is kept, and the remedy, when an input has changed."""
    rows = folder.saved.all_counts.rows
    if not rows or folder.path == STDOUT:
        return "No row is kept. Run the same command again when no program writes to its inputs, or on copies of them."
    return (
        f"{rows} rows are kept in {folder.path}; they belong to the old content. Restore the file with its "
        "modification time, and the same command continues after them, or start over with --restart."
    )


def _check_options(task: TextTask, options: JobOptions) -> None:
    columns, manifest = options.columns, task.manifest
    name = manifest.task
    max_len = checked_length(options.max_seq_length, manifest, max_tokens=manifest.max_len, role=task.role)
    if options.overflow is Overflow.RECUR:
        checked_streaming(manifest, task)
        checked_segment(options.segment, manifest, max_len=manifest.max_len)
    if options.overflow is Overflow.SPLIT and columns.input_ids is not None:
        raise InputError(
            "Rows of ids are not split: which special ids each chunk needs is unknown.",
            hint="Give texts, split them yourself, or cut them: --overflow truncate",
        )
    if options.overflow is Overflow.SPLIT and not task.splits:
        streams = task.streams and bool(manifest.recurrent_states)
        advice = "Stream them: --overflow recur" if streams else "Cut them: --overflow truncate"
        raise InputError(f"The bundle's task is {name}, whose texts are not split.", hint=advice)
    if options.late_chunking is not None and columns.text_pair is not None:
        raise InputError("--late-chunking reads one text per row.", hint="Leave out --text-pair-column.")
    if options.overlap is not None and options.overlap >= max_len:
        raise InputError(
            f"--overlap {options.overlap} leaves no new token for a macro chunk, which has {max_len} tokens.",
            hint=f"Use fewer, or leave it out for {overlap_of(None, max_len)}.",
        )
    check_pairs(task, has_pair=columns.text_pair is not None, has_ids=columns.input_ids is not None)


def _fields(task: TextTask, files: Sequence[InputFile], options: JobOptions) -> tuple[pa.Field, ...]:
    columns = options.columns
    row_id = pa.field("id", pa.int64())
    if columns.id:
        row_id = fields_of_columns([columns.id], files)[0].with_name("id")
    results = (
        *(options.vectors.field(field) if field.name == COLUMN else field for field in task.fields()),
        pa.field("tokens", pa.int32()),
        pa.field("error", pa.string()),
    )
    taken = {"id", *(field.name for field in results)}.intersection(columns.keep or ())
    if taken:
        as_ids = "; without --id-column, the column id is the rows' id" if "id" in taken else ""
        raise InputError(
            f"The inputs have columns with names of result columns: {', '.join(sorted(taken))}.",
            hint=f"Rename them, or list the others: --keep-columns a,b{as_ids}",
        )
    return (row_id, *fields_of_columns(columns.keep or (), files), *results)


def _vectors_of_model(vectors: VectorOptions, own: SentenceSettings | None) -> VectorOptions:
    """The options, with the model's number of dimensions by default, as in sentence-transformers."""
    return replace(vectors, truncate_dim=own.truncate_dim) if own and vectors.truncate_dim is None else vectors


def rows_arrive(inputs: Sequence[str | Path], output: str | Path, options: JobOptions) -> bool:
    """Whether a job runs rows of the standard input while it stays open, and does not read it to its end first.

    Ranges of the first rows that came would depend on the time, and a Parquet file is read from its end.
    """
    vectors = options.vectors
    has_ranges = vectors.ranges is not None or not vectors.output_dtype.needs_ranges
    is_of_lines = options.input_format is None or not options.input_format.is_columnar
    is_one = [str(name) for name in inputs] == ["-"] and Path(output) == STDOUT
    return options.max_wait_ms is not None and is_one and has_ranges and is_of_lines and standard_input_arrives()


def _given_ranges(bundle: Bundle, vectors: VectorOptions, fields: Sequence[pa.Field]) -> Ranges | None:
    """The calibration ranges that were given, if the job's vectors have them."""
    if vectors.ranges is None:
        return None
    if not vectors.output_dtype.needs_ranges:
        raise InputError(
            f"--ranges is for --output-dtype int8 and uint8, and the output's is {vectors.output_dtype.value}.",
            hint="Leave --ranges out, or add --output-dtype int8.",
        )
    identity, is_normalized = identity_of_bundle(bundle.manifest), _normalized(bundle.manifest, vectors)
    ranges = read_ranges(vectors.ranges, bundle=identity, normalized=is_normalized)
    dimensions = ranges.shape[1]
    kind = next((field.type for field in fields if field.name == COLUMN), None)
    while kind is not None and not pa.types.is_fixed_size_list(kind) and hasattr(kind, "value_type"):
        kind = kind.value_type
    if kind is not None and pa.types.is_fixed_size_list(kind) and kind.list_size not in (-1, dimensions):
        raise InputError(
            f"The ranges of {vectors.ranges} have {dimensions} dimensions, and the vectors of this job "
            f"{kind.list_size}.",
            hint="Use the same model and the same --truncate-dim for both jobs.",
        )
    return ranges


def _check_format(kind: ResultFormat, fields: Sequence[pa.Field], options: JobOptions) -> None:
    vectors = next((field.type for field in fields if field.name == COLUMN), None)
    if vectors is None and (kind.is_matrix or not options.vectors.is_default):
        asked = f"A {kind.value} file is" if kind.is_matrix else "--output-dtype, --normalize and --truncate-dim are"
        raise InputError(
            f"{asked} for embeddings, which the bundle's task does not have.", hint="Write .jsonl or .parquet."
        )
    if kind is ResultFormat.NPY and options.late_chunking is not None:
        raise InputError(
            "A .npy file holds vectors alone, and with --late-chunking nothing would tell which text each is of.",
            hint="Write .npz, .parquet or .jsonl.",
        )
    if not kind.is_matrix:
        return
    if any(is_of_tokens(field) for field in fields if field.name == COLUMN):
        raise InputError(
            f"A {kind.value} file holds one vector per text, and a text of this bundle has one per token.",
            hint="Write .parquet or .jsonl.",
        )
    if vectors is None or not pa.types.is_fixed_size_list(vectors):
        raise InputError(
            "The bundle does not state the width of its vectors; a matrix needs it.", hint="Write .parquet."
        )
    if options.columns.keep:
        raise InputError(
            f"A {kind.value} file has no place for --keep-columns.", hint="Write .parquet, or leave it out."
        )
    if not (options.skip_failed or pa.types.is_floating(vectors.value_type)):
        raise InputError(
            f"In a {kind.value} file, failed rows are NaN, which {options.vectors.output_dtype.value} lacks.",
            hint="Leave them out: --skip-failed",
        )


def _metadata(bundle: Bundle, names: Sequence[str], options: JobOptions, identity: Identity) -> dict[str, str]:
    manifest = bundle.manifest
    metadata = {
        "hdexport.version": str(identity["the version of hdexport"]),
        "hdexport.model": manifest.name,
        BUNDLE_KEY: str(identity["bundle"]),
        "hdexport.task": manifest.task,
    }
    if COLUMN in names:
        known = _pooling(manifest)
        pooling, _ = known or ((), False)
        metadata |= {
            "hdexport.pooling": "+".join(pooling) or ("unknown" if known is None else "none"),
            NORMALIZED_KEY: _normalized(manifest, options.vectors),
            "hdexport.dtype": options.vectors.output_dtype.value,
        }
    if options.late_chunking is not None:
        metadata["hdexport.late_chunking"] = options.late_chunking
    return metadata


def _pooling(manifest: Manifest) -> tuple[tuple[str, ...], bool] | None:
    """The poolings of a job's vectors, and whether the model normalizes them; None where the bundle has no record."""
    if manifest.task is Task.FEATURE_EXTRACTION:
        # The manifest says what sentence-transformers makes of the tokens' vectors; a job makes their mean.
        return ("mean",), False
    settings = manifest.sentence
    return None if settings is None else (settings.pooling, settings.normalize)


def _normalized(manifest: Manifest, vectors: VectorOptions) -> str:
    """Whether a job's vectors have length 1: a value of `NORMALIZED_KEY`."""
    known = _pooling(manifest)
    if known is None and not vectors.normalize:
        return "unknown"
    # The first dimensions of a vector of length 1 are shorter.
    by_model = known is not None and known[1] and vectors.truncate_dim is None
    return str(vectors.normalize or by_model).lower()


def _identity(
    bundle: Bundle,
    task: TextTask,
    files: Sequence[InputFile],
    fields: Sequence[pa.Field],
    options: JobOptions,
    prompt: str,
    ranges: Ranges | None,
) -> Identity:
    columns = {
        "keep_columns" if name == "keep" else f"{name}_column": value for name, value in vars(options.columns).items()
    }
    answers = vars(options.answers) if options.answers else dict.fromkeys(vars(AnswerOptions()))
    values = {**columns, **vars(options), **vars(options.vectors), **answers}
    flags = {f"--{name.replace('_', '-')}": value for name, value in values.items() if name not in _CHANGE_NOTHING}
    return {
        "the version of hdexport": importlib.metadata.version("hdexport"),
        "bundle": identity_of_bundle(bundle.manifest),
        **{flag: _plain(value) for flag, value in flags.items()},
        "--ranges": None if ranges is None else f"ranges with the checksum {zlib.crc32(ranges.tobytes()):08x}",
        "--prompt": prompt,
        "--prompt-name": options.prompt_name if task.role is not None else None,
        "inputs": identity_of_inputs(files),
        "columns of the output": [str(field) for field in fields],
    }


def _plain(value: object) -> object:
    """An option's value in JSON; None for none."""
    value = value.value if isinstance(value, Enum) else ",".join(value) if isinstance(value, tuple) else value
    return None if value == "" else value
