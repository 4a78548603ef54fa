"""Show the installed packages, devices and kernels, and the commands that install missing parts."""

from __future__ import annotations

import argparse
import dataclasses
import json

SUMMARY = "show what is installed here, and how to install what is missing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit code is 1 when something installed is broken."""
    from hdexport.doctor import FindingStatus, diagnose

    findings = diagnose()
    healthy = all(finding.status is not FindingStatus.BROKEN for finding in findings)
    if options.json:
        found = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"healthy": healthy, "findings": found}, indent=2))
    else:
        width = max(len(finding.part) for finding in findings)
        for finding in findings:
            print(f"{finding.status.value:<8} {finding.part:<{width}}  {finding.detail}")
            if finding.fix is not None:
                print(f"{'':<8} {'':<{width}}  fix: {finding.fix}")
    return 0 if healthy else 1
