"""How near the cases of a `bench.json` are to the best rates of this machine's CPU in float32.

Usage: python -m benchmarks.roofline BUNDLE DIR [--threads N]

DIR is the output of `hdexport bench BUNDLE -o DIR` on this machine. All series are held to the minimum work of the
bundle's graph, in which windowed attention counts visible pairs only. bfloat16 and int8 may exceed 100 %.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.command import exit_with
from benchmarks.roofline.ceilings import measured_ceilings
from benchmarks.roofline.work import roofline, work_of
from hdexport.bench.results.files import read_result


def main() -> int:
    """Measure the machine's rates, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--threads", type=int, help="CPU threads (default: those of the result)")
    options = parser.parse_args()
    result = read_result(options.result)
    ceilings = measured_ceilings("cpu", threads=options.threads or int(result.environment["threads"]))
    rates = f"{ceilings.matmul_flops_per_s / 1e9:,.1f} GFLOP/s, {ceilings.copy_bytes_per_s / 1e9:,.1f} GB/s"
    table = Table("series", "batch x tokens", "bound ms", "p50 ms", "reached", title=rates, box=None)
    for case in result.cases:
        if case.latency is not None and case.memory is not None and case.memory.vram_bytes is None:
            work = work_of(options.bundle, batch=case.batch, tokens=case.tokens)
            found = roofline(work, ceilings, p50_ms=case.latency.p50_ms)
            figures = (f"{found.bound_ms:.3g}", f"{case.latency.p50_ms:.3g}", f"{found.fraction:.1%}")
            table.add_row(Text(case.series), f"{case.batch} x {case.tokens}", *figures)
    Console().print(table)
    return 0


if __name__ == "__main__":
    exit_with(main)
