"""Show the installed packages, devices and kernels, and the commands that install missing parts."""

from __future__ import annotations

import argparse
import dataclasses
import json

SUMMARY = "show what is installed here, and how to install what is missing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit code is 1 when something installed is broken."""
    from hdexport.doctor import DiagnosticStatus, diagnose

    results = diagnose()
    healthy = all(result.status is not DiagnosticStatus.BROKEN for result in results)
    if options.json:
        print(json.dumps({"healthy": healthy, "results": [dataclasses.asdict(result) for result in results]}, indent=2))
    else:
        width = max(len(result.component) for result in results)
        for result in results:
            print(f"{result.status:<8} {result.component:<{width}}  {result.detail}")
            if result.fix is not None:
                print(f"{'':<8} {'':<{width}}  fix: {result.fix}")
    return 0 if healthy else 1
