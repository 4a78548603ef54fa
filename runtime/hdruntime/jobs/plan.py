"""Plans a batch job: all checks that are possible before a row is run."""

from __future__ import annotations

import importlib.metadata
import zlib
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pyarrow as pa

from hdruntime.bundle.identity import identity_of_bundle
from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.sentence_settings import SentenceSettings
from hdruntime.errors import InputError, Message, Setting, joined
from hdruntime.inference.streaming import checked_segment
from hdruntime.jobs.arriving import standard_input_arrives
from hdruntime.jobs.identity import Identity, identity_of_inputs
from hdruntime.jobs.input_files import InputFile
from hdruntime.jobs.input_search import fields_of_columns, find_inputs, resolved_columns
from hdruntime.jobs.job import Job
from hdruntime.jobs.options import JobOptions
from hdruntime.jobs.output import STDOUT
from hdruntime.jobs.row_inference import fields_of_rows
from hdruntime.jobs.state_folder import CHANGE_OUTPUT
from hdruntime.jobs.uploads import output_at
from hdruntime.jobs.vectors import COLUMN, Ranges, VectorOptions, is_of_tokens
from hdruntime.jobs.writers import ResultFormat
from hdruntime.tasks.embedding import column_of_spans
from hdruntime.tasks.hybrid_similarity import EmbeddingKind
from hdruntime.tasks.of_bundle import check_pairs, task_of_bundle
from hdruntime.tasks.task import TextTask
from hdruntime.tasks.text_inference import checked_streaming
from hdruntime.text.answers import AnswerOptions
from hdruntime.text.chunking import overlap_of
from hdruntime.text.encoding import Overflow
from hdruntime.text.lengths import checked_length
from hdruntime.text.ranges import BUNDLE_KEY, NORMALIZED_KEY, read_ranges

_NOT_OF_IDENTITY = (
    *("batch_size", "batch_tokens", "force", "restart", "max_wait_ms"),
    # Other settings have the content of these.
    *("columns", "vectors", "answers", "spans_column", "keeps_all_column"),
)
"""Settings that may differ when a job continues. All others belong to its identity."""


_TRUNCATE = Setting("overflow", Overflow.TRUNCATE)


def plan_job(
    bundle: Bundle, inputs: Sequence[str | Path], output: str | Path, *, options: JobOptions | None = None
) -> Job:
    """Do all checks that are possible before a session is loaded or a row is run.

    Args:
        bundle: the bundle that will run.
        inputs: files, directories, patterns and URLs, see `find_inputs`; ``-`` is the standard input, which is read
            here.
        output: a .jsonl, .parquet, .npy or .npz file; a name without a suffix is a directory of Parquet files, and
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
    inputs_found = find_inputs(
        inputs,
        columns=options.columns,
        input_format=options.input_format,
        spool=destination.spool,
        wait_seconds=(options.max_wait_ms or 0) / 1000 if rows_arrive(inputs, destination.path, options) else None,
    )
    if any(destination.holds(file.source.identity) for file in inputs_found):
        raise InputError(
            f"{destination.name} is an input as well as the output.", hint=("Keep the input, and ", *CHANGE_OUTPUT)
        )
    files = [file for file in inputs_found if file.rows != 0]
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
        without_rows=tuple(file for file in inputs_found if file.rows == 0),
        destination=destination,
        options=options,
        task=task,
        fields=fields,
        metadata=_metadata(bundle, [field.name for field in fields], options, identity),
        identity=identity,
        finished=finished,
        ranges=ranges,
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
            hint=("Pass texts, split the rows yourself, or truncate them: ", _TRUNCATE),
        )
    if options.overflow is Overflow.SPLIT and not task.splits:
        streams = task.streams and bool(manifest.recurrent_states)
        hint = ("Stream them: ", Setting("overflow", Overflow.RECUR)) if streams else ("Truncate them: ", _TRUNCATE)
        raise InputError(f"The bundle's task is {name}, whose texts are not split.", hint=hint)
    if options.late_chunking is not None and columns.text_pair is not None:
        raise InputError(
            *(Setting("late_chunking"), " reads one text per row."),
            hint=("Leave out ", Setting("text_pair_column"), "."),
        )
    if options.overlap is not None and options.overlap >= max_len:
        raise InputError(
            Setting("overlap", options.overlap),
            f" leaves no new token for a macro chunk, which has {max_len} tokens.",
            hint=f"Use fewer, or leave it out for {overlap_of(None, max_len)}.",
        )
    check_pairs(task, has_pair=columns.text_pair is not None, has_ids=columns.input_ids is not None)


def _fields(task: TextTask, files: Sequence[InputFile], options: JobOptions) -> tuple[pa.Field, ...]:
    columns = options.columns
    row_id = pa.field("id", pa.int64())
    if columns.id:
        row_id = fields_of_columns([columns.id], files)[0].with_name("id")
    results = tuple(
        options.vectors.field(field) if field.name == COLUMN else field
        for field in fields_of_rows(task, options.overflow)
    )
    taken = {"id", *(field.name for field in results)}.intersection(columns.keep or ())
    if taken:
        as_ids = ("; without ", Setting("id_column"), ", the column id is the rows' id") if "id" in taken else ()
        raise InputError(
            f"The inputs have columns with names of result columns: {', '.join(sorted(taken))}.",
            hint=("Rename them, or list the others: ", Setting("keep_columns", "a,b"), *as_ids),
        )
    return (row_id, *fields_of_columns(columns.keep or (), files), *results)


def _vectors_of_model(vectors: VectorOptions, settings: SentenceSettings | None) -> VectorOptions:
    """The options, with the model's number of dimensions by default, as in sentence-transformers."""
    if settings is None or vectors.truncate_dim is not None:
        return vectors
    return replace(vectors, truncate_dim=settings.truncate_dim)


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
            *(Setting("ranges"), " is for ", Setting("output_dtype"), " int8 and uint8, and the output's is "),
            f"{vectors.output_dtype.value}.",
            hint=("Leave ", Setting("ranges"), " out, or add ", Setting("output_dtype", "int8"), "."),
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
            hint=("Use one model and one ", Setting("truncate_dim"), " for both jobs."),
        )
    return ranges


def _check_format(kind: ResultFormat, fields: Sequence[pa.Field], options: JobOptions) -> None:
    vectors = next((field.type for field in fields if field.name == COLUMN), None)
    if vectors is None and (kind.is_matrix or not options.vectors.is_default):
        what: Message = (
            f"A {kind.value} file is"
            if kind.is_matrix
            else (Setting("output_dtype"), ", ", Setting("normalize"), " and ", Setting("truncate_dim"), " are")
        )
        raise InputError(
            *joined(what, " for embeddings, which the bundle's task does not have."), hint="Write .jsonl or .parquet."
        )
    if kind is ResultFormat.NPY and options.late_chunking is not None:
        raise InputError(
            "A .npy file holds vectors alone, and with ",
            Setting("late_chunking"),
            " nothing would tell which text each vector is of.",
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
    if set(options.returns or ()) - {EmbeddingKind.DENSE}:
        raise InputError(
            f"A {kind.value} file holds dense embeddings alone.",
            hint=("Write .parquet or .jsonl, or leave out ", Setting("returns"), "."),
        )
    if options.columns.keep:
        raise InputError(
            f"A {kind.value} file cannot hold ", Setting("keep_columns"), ".", hint="Write .parquet, or leave it out."
        )
    if not (options.skip_failed or pa.types.is_floating(vectors.value_type)):
        raise InputError(
            f"In a {kind.value} file, failed rows are NaN, which {options.vectors.output_dtype.value} lacks.",
            hint=("Leave them out: ", Setting("skip_failed", True)),
        )


def _metadata(bundle: Bundle, names: Sequence[str], options: JobOptions, identity: Identity) -> dict[str, str]:
    manifest = bundle.manifest
    metadata = {
        "hdexport.version": str(identity["version"]),
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
        # The manifest has what sentence-transformers makes of the tokens' vectors; a job makes their mean.
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
    settings: dict[str, Any] = {
        **columns,
        **vars(options),
        **vars(options.vectors),
        **answers,
        "ranges": None if ranges is None else f"ranges with the checksum {zlib.crc32(ranges.tobytes()):08x}",
        "prompt": prompt,
        "prompt_name": options.prompt_name if task.role is not None else None,
    }
    return {
        "version": importlib.metadata.version("hdexport"),
        "bundle": identity_of_bundle(bundle.manifest),
        "settings": {name: _plain(value) for name, value in settings.items() if name not in _NOT_OF_IDENTITY},
        "inputs": identity_of_inputs(files),
        "columns": [str(field) for field in fields],
    }


def _plain(value: object) -> object:
    """An option's value in JSON; None for none."""
    value = value.value if isinstance(value, Enum) else ",".join(value) if isinstance(value, tuple) else value
    return None if value == "" else value
