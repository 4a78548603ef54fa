"""List the model types that hdexport can build, with and without a family."""

from __future__ import annotations

import argparse
import textwrap

SUMMARY = "list the model types that can be built"

_WIDTH = 88

_WITH = "Model types with a family. Their positions, attention and tuning can be changed where docs/models.md says so:"
_WITHOUT = (
    "Any other model type of transformers, and with --trust-remote-code a class of the checkpoint's own, is built as "
    "its code computes, and only if it is proved against PyTorch on the full grid of lengths, batches and paddings. "
    "docs/models.md lists the types that were tried."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no arguments."""


def run(options: argparse.Namespace) -> int:
    """Print the list."""
    from hdexport.families import SUPPORTED_MODEL_TYPES

    print(textwrap.fill(_WITH, _WIDTH))
    print(textwrap.indent(textwrap.fill(", ".join(SUPPORTED_MODEL_TYPES), _WIDTH, break_on_hyphens=False), "  "))
    print(textwrap.fill(_WITHOUT, _WIDTH))
    return 0
