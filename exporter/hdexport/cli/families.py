"""List the model types that hdexport can build, with and without a family."""

from __future__ import annotations

import argparse
import textwrap

SUMMARY = "list the model types that can be built"

_WIDTH = 88

_WITH = "Model types with a family; docs/models.md says which support --max-len, --attention and tune:"
_WITHOUT = (
    "Any other model type of transformers, and with --trust-remote-code a class in the checkpoint, is traced from its "
    "code, and built only if all cases of hdexport verify pass. docs/models.md lists the tested types."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no arguments."""


def run(options: argparse.Namespace) -> int:
    from hdexport.families import SUPPORTED_MODEL_TYPES

    print(textwrap.fill(_WITH, _WIDTH))
    print(textwrap.indent(textwrap.fill(", ".join(SUPPORTED_MODEL_TYPES), _WIDTH, break_on_hyphens=False), "  "))
    print(textwrap.fill(_WITHOUT, _WIDTH))
    return 0
