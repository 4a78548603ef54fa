"""Writes docs/cli.md from the help of the commands: python docs/generate_cli.py"""

from __future__ import annotations

__all__ = ["COLUMNS", "reference"]

import contextlib
import io
import os
from pathlib import Path

from hdexport.cli import COMMANDS, parser

COLUMNS = 100
"""Width of the help; without it, it would be as wide as the terminal that this runs in."""

_HEAD = """\
# The command line

Written by `python docs/generate_cli.py` from the help of the commands; change that instead.

Results go to stdout, progress and errors to stderr; progress shows on a terminal only. The exit code is 0 when all is
done, 1 after an error, 2 when `hdexport run` is done but rows have failed, 130 when it was interrupted and 143 when
it was terminated.
"""


def reference() -> str:
    """The reference of all commands, Markdown."""
    sections = [f"## hdexport\n\n```text\n{_help()}```\n"]
    sections += [f"## hdexport {name}\n\n```text\n{_help(name)}```\n" for name in COMMANDS]
    return "\n".join([_HEAD, *sections])


def _help(*command: str) -> str:
    os.environ["COLUMNS"] = str(COLUMNS)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        parser(command).parse_args([*command, "--help"])
    return shown.getvalue()


if __name__ == "__main__":
    Path(__file__).with_name("cli.md").write_text(reference(), encoding="utf-8")
