"""`hdexport bench` beside other products: OpenVINO, Optimum and sentence-transformers.

Usage: python -m benchmarks.lengths BUNDLE [options of hdexport bench] [--baselines torch,optimum,...]
"""

from __future__ import annotations

import argparse

from benchmarks.baselines import BASELINES
from benchmarks.command import exit_with
from benchmarks.record import command_line
from hdexport.cli import bench

_MODULE = "benchmarks.lengths"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, and write a page and a JSON file."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    bench.add_arguments(parser, baselines=tuple(BASELINES))
    options = parser.parse_args(arguments)
    options.command_line = command_line(_MODULE)
    return bench.run(options, baselines=BASELINES)


if __name__ == "__main__":
    exit_with(main)
