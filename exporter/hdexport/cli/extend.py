"""Not written yet."""

from __future__ import annotations

import argparse

SUMMARY = "not written yet"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    raise NotImplementedError
