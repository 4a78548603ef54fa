"""One operator's kernels on an NVIDIA GPU: against PyTorch's dense SDPA, FlexAttention and the roofline.

Nothing is timed before the kernels have given the right answers on that GPU, in every dtype and head_dim.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import kernels, table
from benchmarks.gpu.cases import DTYPES, FAMILIES
from benchmarks.gpu.job import Job, StepFailedError
from benchmarks.record import command_line
from hdexport.bench.measure.calls import environment

WRONG_ANSWERS = 1
"""Exit status."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m benchmarks.gpu kernels``."""
    parser.add_argument(
        "family", choices=FAMILIES, help="window, block-sparse, chunk or LSH attention, or by clipped distance"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=sorted(kernels.LENGTHS))
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--window", type=int, default=kernels.WINDOW, help="tokens on each side (default: 256)")
    parser.add_argument("--total-tokens", type=int, default=kernels.TOTAL_TOKENS, help="batch x tokens")
    parser.add_argument("--tune", action="store_true", help="time other tiles at the longest of --tokens")
    parser.add_argument("--compile", action="store_true", help="registers and spills of every kernel; needs no GPU")
    # Given before the command, too: no default that takes the place of it.
    parser.add_argument("--output", type=Path, default=argparse.SUPPRESS, help="append the results, as JSON lines")


def run(options: argparse.Namespace) -> int:
    """Check, then time; or compile. The result is the exit status."""
    about = {"command": command_line("benchmarks.gpu"), "environment": environment()}
    job = _ShownJob(step=f"kernels {options.family}", output=options.output, rehearsal=options.rehearse, about=about)
    if options.compile:
        kernels.count_registers(job, options.family, kernels.ARCHITECTURES)
        return 0
    try:
        kernels.check(job, options.family)
    except StepFailedError as error:
        print(f"wrong answer: {error}")
        return WRONG_ANSWERS
    print("answers are right in every dtype and head_dim", file=sys.stderr)
    kernels.time_kernels(
        job, options.family, options.head_dims, options.dtype,
        lengths=options.tokens, window=options.window, total_tokens=options.total_tokens, is_tuned=options.tune,
    )  # fmt: skip
    for verdict in () if job.rehearsal else table.verdicts(job.rows, about["environment"].get("gpu", "")):
        print(verdict)
    return 0


@dataclass(frozen=True, kw_only=True)
class _ShownJob(Job):
    """Prints each row as it comes; a rehearsal's times mean nothing and are not shown."""

    about: dict[str, Any]
    rows: list[table.Row] = field(default_factory=list)

    def write(self, **row: Any) -> None:
        super().write(**row, **self.about)
        if row["case"] != "answers":
            self.rows.append(row)
            print(f"{row['case']}: rehearsed" if self.rehearsal else table.kernel_line(row), flush=True)
