"""Run a bundle over files of texts: one row out per row in, in order; with --late-chunking, one per chunk.

Inputs are JSON Lines, CSV, TSV, Parquet, Arrow and text files (each line is a text), directories of them, patterns and
URLs. The output has the columns id, kept columns, those of the bundle's task (an embedding, a label, ...), tokens
and error. An invalid row has the reason in error; the job continues, and the exit code is 2. The output appears
when it is complete, or not at all. A job that was stopped or killed keeps its results in a folder .OUT.job beside
the output, and the same command continues after them. See docs/batch_jobs.md.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hdruntime
from hdexport.cli.arguments import (
    add_max_seq_length_argument,
    add_precision_argument,
    options_as,
    path_or_url,
    whole_number,
)
from hdexport.cli.flags import flag
from hdexport.cli.process import READER_GONE, exit_code, outlive_readers
from hdruntime.backends.precision import Precision
from hdruntime.backends.registry import backend_names, backends, needs_gpu
from hdruntime.errors import DamagedJobError, HdexportError, InputChangedError, InputError, joined

if TYPE_CHECKING:
    from hdexport.cli.job_report import JobReport
    from hdruntime.bundle.reader import Bundle
    from hdruntime.jobs import Job, JobOptions
    from hdruntime.jobs.progress import JobProgress
    from hdruntime.jobs.shards import JobPool
    from hdruntime.ray.worker import Loaded
    from hdruntime.session import Session

SUMMARY = "run a bundle over files of texts"

_ROWS_FAILED = 2
"""Exit code of a job that was done, but not for every row."""

_FAILED = {
    "unreadable": "unreadable",
    "column": "without a usable value in a column",
    "input": "rejected by the bundle",
    "not_finite": "with NaN or infinity",
    "backend": "failed in the backend",
}
"""Kind of a row's error, see `hdruntime.jobs.rows.ErrorKind` -> what such rows are called."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bundle",
        metavar="BUNDLE",
        type=path_or_url,
        help="directory of a bundle, or organisation/name[@revision] on the Hugging Face Hub",
    )
    parser.add_argument(
        "inputs",
        metavar="INPUT",
        type=path_or_url,
        nargs="+",
        help="file (.jsonl, .ndjson, .json, .csv, .tsv, .txt, each also .gz or .zst; .parquet, .arrow), directory "
        "(also of Dataset.save_to_disk), quoted pattern, URL (s3://, gs://, hf://, https://), or - for standard input",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=path_or_url,
        required=True,
        help="file (.jsonl, .parquet, .npy or .npz, also at a URL such as s3://...), a name without a suffix for a "
        "directory of Parquet files, or - for JSON Lines on standard output",
    )
    parser.add_argument(
        "--max-wait-ms",
        metavar="N",
        type=functools.partial(whole_number, minimum=0),
        default=200,
        help="maximum wait of a row for further rows, in milliseconds, when standard input is an open stream such as "
        "tail -f and the output is - (default: 200)",
    )
    parser.add_argument("--force", action="store_true", help="replace the output if it exists")
    parser.add_argument(
        "--restart", action="store_true", help="discard the kept rows of an unfinished job and start over"
    )
    parser.add_argument(
        "--progress",
        choices=["auto", "bar", "lines", "json", "none"],
        default="auto",
        help="progress on stderr: bar, one updated line; lines, a line every few seconds; json, one object per line, "
        "see docs/batch_jobs.md; none; auto (default): bar on a terminal, else lines",
    )
    _add_columns(parser.add_argument_group("rows"))
    _add_texts(parser.add_argument_group("texts"))
    _add_results(parser.add_argument_group("results"))
    _add_backend(parser.add_argument_group("backend"))


def _add_columns(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--input-format",
        choices=["jsonl", "csv", "tsv", "txt", "parquet", "arrow"],
        help="format of all inputs (default: by their suffixes; jsonl on standard input)",
    )
    group.add_argument("--text-column", metavar="NAME", default="text", help="column of the text (default: text)")
    group.add_argument(
        "--text-pair-column",
        metavar="NAME",
        help="column of the second text, for tasks on pairs; for question-answering, the context",
    )
    group.add_argument(
        "--input-ids-column",
        metavar="NAME",
        help="column of lists of token ids with special tokens, instead of texts",
    )
    group.add_argument(
        "--id-column",
        metavar="NAME",
        help="column of the row id, of any type; '' numbers rows from 0 (default: id if the input has it, else '')",
    )
    group.add_argument(
        "--keep-columns",
        metavar="NAMES",
        default="",
        help="input columns to copy to the output: a,b or all; all of JSON Lines means the columns of the first 100 "
        "rows",
    )


def _add_texts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--overflow",
        choices=["error", "truncate", "split", "recur"],
        default="error",
        help="texts of more than --max-seq-length tokens: error (default) fails the row; truncate, with the "
        "columns truncated and tokens_given; split runs chunks and pools their outputs; recur streams every text "
        "through a bundle with recurrent state, see docs/streaming.md",
    )
    add_max_seq_length_argument(group)
    group.add_argument(
        "--segment",
        metavar="N",
        type=whole_number,
        help="tokens per segment with --overflow recur (default: 512, at most the bundle's limit)",
    )
    group.add_argument(
        "--stride",
        metavar="N",
        type=functools.partial(whole_number, minimum=0),
        default=0,
        help="tokens that consecutive chunks of a split text share (default: 0)",
    )
    group.add_argument(
        "--split-pooling",
        choices=["mean", "max"],
        help="pooling of the chunks' embeddings or logits with --overflow split: mean, weighted by tokens (default), "
        "or max (default for pairs of a reranker)",
    )
    group.add_argument(
        "--late-chunking",
        metavar="CHUNKS",
        help="late chunking: encode the whole text and write one row per chunk, the mean of its token embeddings. "
        "CHUNKS is tokens:N, sentences, or a column with lists of [start, end] in characters; needs a model with "
        "mean pooling",
    )
    group.add_argument(
        "--overlap",
        metavar="N",
        type=functools.partial(whole_number, minimum=0),
        help="with --late-chunking: tokens that consecutive macro chunks share if a text is longer than the bundle "
        "accepts (default: 256, at most a quarter of a macro chunk)",
    )
    group.add_argument(
        "--prompt-name",
        metavar="NAME",
        help="name of the model's prompt to put before every text, e.g. query; `hdexport inspect` lists them "
        "(default: the model's default prompt, if any). For token-similarity, query encodes texts as queries instead "
        "of documents",
    )
    group.add_argument("--prompt", metavar="TEXT", help="text of the prompt; '' for none")


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--normalize", action="store_true", help="normalize embeddings to length 1")
    group.add_argument(
        "--truncate-dim",
        metavar="N",
        type=whole_number,
        help="number of embedding dimensions to keep, before normalization (default: truncate_dim of the model, "
        "usually all)",
    )
    group.add_argument(
        "--output-dtype",
        choices=["float32", "float16", "int8", "uint8", "binary", "ubinary"],
        default="float32",
        help="dtype of embeddings (default: float32). int8 and uint8 are scaled per dimension by --ranges; binary and "
        "ubinary have one bit per dimension",
    )
    group.add_argument(
        "--ranges",
        "--ranges-from",
        metavar="FILE",
        type=Path,
        help="minimum and maximum per dimension for int8 and uint8: the output of another job of that dtype, or a "
        ".npy file of float32 [2, dimensions]; give the queries the ranges of the documents (default: the first "
        "shard of rows)",
    )
    group.add_argument(
        "--max-active-dims",
        metavar="N",
        type=whole_number,
        help="sparse-similarity: number of largest weights to keep per text (default: max_active_dims of the model, "
        "usually all)",
    )
    group.add_argument(
        "--returns",
        metavar="KINDS",
        help="hybrid-similarity: kinds of embeddings to write, dense,sparse,colbert or some of them (default: dense)",
    )
    group.add_argument(
        "--aggregation",
        choices=["none", "simple", "first", "max", "average"],
        help="token-classification: aggregation_strategy of transformers. none (default): one entity per token; "
        "simple: adjacent tokens of one label; first, max, average: whole words, labelled by their first token, "
        "highest score or highest mean score",
    )
    group.add_argument(
        "--top-k",
        metavar="N",
        type=whole_number,
        help="question-answering: number of answers; more than 1 are a list in the column answers (default: 1)",
    )
    group.add_argument(
        "--handle-impossible-answer",
        action="store_true",
        help="question-answering: return an empty answer if no answer in the context is more probable",
    )
    group.add_argument("--skip-failed", action="store_true", help="omit failed rows from the output")


def _add_backend(group: argparse._ArgumentGroup) -> None:
    *preferred_ones, _ = [entry for entry in backends() if not entry.needs_gpu]
    preferred = " or ".join(entry.library for entry in preferred_ones)
    devices = "; ".join(f"{entry.library}'s device: {entry.devices}" for entry in preferred_ones if entry.devices)
    group.add_argument(
        "--backend",
        metavar="BACKEND",
        choices=["auto", *backend_names()],
        default="auto",
        help=f"{', '.join(backend_names())}; or auto (default): the first backend that runs here, in the order "
        f"engines, ONNX Runtime on a GPU, {preferred} on a CPU where it is faster, ONNX Runtime on a CPU",
    )
    add_precision_argument(group)
    group.add_argument("--device", metavar="NAME", help=f"{devices}; not with --ray")
    group.add_argument(
        "--rebuild",
        action="store_true",
        help="build an engine first if there is a GPU and no engine of the bundle runs on it",
    )
    group.add_argument(
        "--threads", metavar="N", type=whole_number, help="number of CPU threads (default: one per usable core)"
    )
    group.add_argument(
        "--batch-tokens",
        metavar="N",
        type=whole_number,
        help="maximum tokens per batch, padding included; a longer text runs alone (default: depends on the backend; "
        "1024 on a CPU)",
    )
    group.add_argument(
        "--batch-size",
        metavar="N",
        type=whole_number,
        help="maximum texts per batch (default: limited by --batch-tokens only)",
    )
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        nargs="?",
        const="",
        type=_ray_address,
        help="address of a Ray cluster, host:port or auto, to run on; without ADDRESS a local cluster",
    )


def run(options: argparse.Namespace) -> int:
    from hdexport.cli.job_report import job_report
    from hdruntime.hub import opened_bundle
    from hdruntime.jobs import plan_job, run_job
    from hdruntime.jobs.output import STDOUT
    from hdruntime.jobs.plan import rows_arrive

    if options.output != "-":  # rows that are printed are the result
        outlive_readers()
    job_options = _job_options(options)
    backend = ""
    with job_report(options.progress) as report, contextlib.ExitStack() as exits:
        bundle = opened_bundle(options.bundle, options.backend, options.precision)
        # Loaded before the first row comes, which would wait for it.
        waits_for_rows = rows_arrive(options.inputs, options.output, job_options)
        session = exits.enter_context(_session(bundle, options, report)) if waits_for_rows else None
        job = plan_job(bundle, options.inputs, options.output, options=job_options)
        try:
            done = job.done
            if done is None:
                with _pool(bundle, job, options, report, session) as (pool, backend):
                    done = run_job(job, pool, on_progress=report.progress, writer=flag)
            else:
                report.done_already(done)
                job.destination.upload()
        except KeyboardInterrupt as stop:
            printed = "Printed rows are not kept: the same command starts with the first row again."
            nothing = printed if job.output == STDOUT else "No row is kept: the same command starts over."
            report.ended("stopped", f"Stopped. {_kept(job) or nothing}")
            return exit_code(stop)
        except BrokenPipeError:
            if job.output != STDOUT:
                raise
            report.ended("stopped", "Stopped: the program that reads the standard output has ended.")
            return READER_GONE
        except HdexportError as error:
            # Where the same command does not continue the kept rows, the error says how to go on.
            continues = not isinstance(error, InputChangedError | DamagedJobError)
            if continues and (kept := _kept(job)):
                error.hint = joined(error.hint, "\n" if error.hint else "", kept)
            report.ended("failed", error.message(flag))
            raise
        has_column = not (options.skip_failed or job.destination.format.is_matrix)
        report.ended("done", _failures(done, has_column=has_column))
    padding = f", {done.padding_waste:.0%} padding" if done.padded_tokens else ""
    cut = f", {done.truncated_rows} truncated" if done.truncated_rows else ""
    print(
        f"{done.rows} rows, {done.failed_rows} failed{cut}, {done.tokens} tokens in {done.seconds:.1f} s "
        f"({done.tokens / max(done.seconds, 1e-9):.0f} tokens/s{padding}): {options.output}{backend}",
        file=sys.stderr if job.output == STDOUT else sys.stdout,
    )
    return _ROWS_FAILED if done.failed_rows else 0


def _job_options(options: argparse.Namespace) -> JobOptions:
    from hdruntime.jobs import JobOptions, VectorOptions
    from hdruntime.jobs.input_files import RowFormat
    from hdruntime.jobs.rows import Columns
    from hdruntime.text.answers import AnswerOptions
    from hdruntime.text.embeddings import EmbeddingPrecision
    from hdruntime.text.encoding import Overflow
    from hdruntime.text.entities import Aggregation
    from hdruntime.text.splitting import SplitPooling

    impossible = options.handle_impossible_answer
    asks = impossible or options.top_k is not None
    return options_as(
        JobOptions,
        options,
        columns=Columns(
            text=options.text_column,
            text_pair=options.text_pair_column,
            id=options.id_column,
            input_ids=options.input_ids_column,
            keep=None if options.keep_columns == "all" else tuple(filter(None, options.keep_columns.split(","))),
        ),
        input_format=None if options.input_format is None else RowFormat(options.input_format),
        vectors=options_as(VectorOptions, options, output_dtype=EmbeddingPrecision(options.output_dtype)),
        overflow=Overflow(options.overflow),
        split_pooling=None if options.split_pooling is None else SplitPooling(options.split_pooling),
        aggregation=None if options.aggregation is None else Aggregation(options.aggregation),
        answers=AnswerOptions(top_k=options.top_k or 1, handle_impossible_answer=impossible) if asks else None,
        returns=None if options.returns is None else tuple(options.returns.split(",")),
        max_wait_ms=None if options.ray is not None else options.max_wait_ms,  # Ray's workers answer in large parts
        precision=Precision(options.precision),
    )


def _ray_address(text: str) -> str:
    """The value of ``--ray``; the path of a bundle after a bare ``--ray`` is not one."""
    if not re.fullmatch(r"(auto|\S+:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not auto or host:port")
    return text


@contextlib.contextmanager
def _pool(
    bundle: Bundle, job: Job, options: argparse.Namespace, report: JobReport, session: Session | None
) -> Iterator[tuple[JobPool, str]]:
    """The pool, and a line for the job's end that says which backend ``auto`` took and why."""
    from hdruntime.jobs.row_inference import LocalPool

    if options.ray is not None:
        if options.rebuild:
            raise InputError(
                "--rebuild is for one machine; with --ray every worker would build.",
                hint=f"Build the engine before: hdexport rebuild {shlex.quote(str(bundle.path))}",
            )
        if options.device is not None:
            raise InputError(
                f"--device {options.device} is for one machine; Ray gives its workers CPU cores or NVIDIA GPUs.",
                hint="Leave it out, or run without --ray.",
            )
        from hdruntime.ray import RayPool

        address = options.ray or None
        with RayPool(bundle.path, job, backend=options.backend, threads=options.threads, address=address) as pool:
            report.loaded(has_gpu=False)
            assert pool.loaded is not None
            yield pool, _backend_line(options, pool.loaded)
        return
    with _session(bundle, options, report) if session is None else contextlib.nullcontext(session) as loaded:
        chosen = _backend_line(options, loaded)
        yield LocalPool(loaded, job.task, options=job.options), chosen


@contextlib.contextmanager
def _session(bundle: Bundle, options: argparse.Namespace, report: JobReport) -> Iterator[Session]:
    with hdruntime.load(
        bundle,
        options.backend,
        threads=options.threads,
        precision=options.precision,
        device=options.device,
        rebuild=options.rebuild,
    ) as session:
        report.loaded(has_gpu=needs_gpu(session.backend))
        yield session


def _backend_line(options: argparse.Namespace, loaded: Session | Loaded) -> str:
    """A line that says which backend ``auto`` chose, in which precision, and why; empty for a requested backend."""
    if options.backend != "auto":
        return ""
    precision = "" if loaded.precision == "auto" else f" in {loaded.precision}"
    return f"\nBackend: {loaded.backend}{precision}. {loaded.backend_reason}"


def _kept(job: Job) -> str:
    again = "The same command without --restart" if job.options.restart else "The same command"
    kept = job.destination.kept()
    return f"{kept}. {again} continues after them." if kept else ""


def _failures(done: JobProgress, *, has_column: bool) -> str | None:
    if not done.failed_rows:
        return None
    kinds = "; ".join(f"{count} {_FAILED[kind]}" for kind, count in done.errors.items())
    return (
        f"{done.failed_rows} of {done.rows} rows failed: {kinds}.\n"
        f"{'The column `error` says why. ' if has_column else ''}The first of them is {done.first_error}"
    )
