"""Run a bundle over files of texts: a row in, a row out, in order.

Inputs are .jsonl, .parquet and .txt files (of .txt, every line is a text) and directories of such files; the
output is .jsonl or .parquet. It has the columns id, those of the bundle's task (an embedding, a label, ...),
tokens and error. A row that cannot be used has its error there; the job goes on, and the exit code is 2. The
output appears when it is complete, or not at all.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.cli.arguments import whole_number

if TYPE_CHECKING:
    from hdruntime.jobs import JobProgress

SUMMARY = "run a bundle over files of texts"

_ROWS_FAILED = 2
"""Exit code of a job that was done, but not for every row."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="directory that `hdexport build` made")
    parser.add_argument(
        "inputs",
        metavar="INPUT",
        type=Path,
        nargs="+",
        help=".jsonl, .parquet or .txt file, or directory of them",
    )
    parser.add_argument("-o", "--output", metavar="OUT", type=Path, required=True, help=".jsonl or .parquet file")
    parser.add_argument("--backend", default="auto", help="onnxruntime, tensorrt, tensorrt_rtx or auto (default: auto)")
    parser.add_argument("--text-column", metavar="NAME", default="text", help="column of the text (default: text)")
    parser.add_argument(
        "--text-pair-column",
        metavar="NAME",
        help="column of the second text, for tasks on pairs; for question-answering, the context",
    )
    parser.add_argument(
        "--id-column", metavar="NAME", help="column of the row's id (default: rows are numbered from 0)"
    )
    parser.add_argument(
        "--max-batch-tokens",
        metavar="N",
        help="most tokens of a batch, padding included; a longer text goes alone (default: what suits the backend; "
        "4096 on a CPU)",
    )
    parser.add_argument(
        "--overflow",
        choices=["error", "truncate"],
        default="error",
        help="what happens to a text of more tokens than the bundle accepts (default: error)",
    )
    parser.add_argument("--force", action="store_true", help="replace the output if it exists")
    parser.add_argument("--threads", metavar="N", help="CPU threads (default: the backend's choice)")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    import hdruntime
    from hdexport.cli.progress import StatusLine
    from hdruntime.jobs import JobOptions, plan_job, run_job
    from hdruntime.rows import Columns
    from hdruntime.tokenization import Overflow

    max_batch_tokens = _optional_number("--max-batch-tokens", options.max_batch_tokens, example=4096)
    threads = _optional_number("--threads", options.threads, example=2)
    columns = Columns(text=options.text_column, text_pair=options.text_pair_column, id=options.id_column)
    job_options = JobOptions(
        columns=columns,
        max_batch_tokens=max_batch_tokens,
        overflow=Overflow(options.overflow),
        force=options.force,
    )
    bundle = hdruntime.open_bundle(options.bundle)
    job = plan_job(bundle, options.inputs, options.output, options=job_options)
    with StatusLine() as line:
        line.begin("Loading the bundle")
        with hdruntime.load(bundle, options.backend, threads=threads) as session:
            line.begin("Reading")
            done = run_job(job, session, on_progress=lambda progress: line.show(_progress_text(progress)))
    print(
        f"{done.rows} rows, {done.failed_rows} failed, {done.tokens} tokens in {done.seconds:.1f} s "
        f"({_tokens_per_second(done):.0f} tokens/s): {options.output}"
    )
    if done.failed_rows:
        print(
            f"{done.failed_rows} of {done.rows} rows failed; the column `error` says why. "
            f"One of them is {done.first_error}",
            file=sys.stderr,
        )
        return _ROWS_FAILED
    return 0


def _optional_number(option: str, text: str | None, *, example: int) -> int | None:
    return None if text is None else whole_number(option, text, example=example)


def _progress_text(done: JobProgress) -> str:
    failed = f", {done.failed_rows} failed" if done.failed_rows else ""
    return f"{done.rows} rows{failed}, {_tokens_per_second(done):.0f} tokens/s"


def _tokens_per_second(done: JobProgress) -> float:
    return done.tokens / done.seconds if done.seconds else 0.0
