"""Writes docs/cli.md from the help of the commands: python docs/generate_cli.py"""

from __future__ import annotations

__all__ = ["COLUMNS", "reference"]

import contextlib
import io
import os
from pathlib import Path

from hdexport.cli import COMMANDS, parser

COLUMNS = 100
"""Width of the help; by default it would be that of the terminal."""

_HEAD = """\
# The command line

Written by `python docs/generate_cli.py` from the help of the commands; change that instead.

`python -m hdexport` is the same command. Options may stand before, between and after a command's other arguments.
Results go to stdout, progress and errors to stderr; progress shows on a terminal only. After Ctrl-C a command says what
it kept.

| Exit code | Meaning |
| --- | --- |
| 0 | Everything is done. |
| 1 | An error, a failed check, or `doctor` found something broken. |
| 2 | `hdexport run` is done, but rows failed. |
| 129, 130, 143 | Stopped: the terminal hung up, Ctrl-C, SIGTERM. |
| 141 | The reader of the output is gone, as in `hdexport inspect BUNDLE \\| head -1`. |

`build`, `rebuild`, `extend`, `tune`, `package`, `verify`, `run` and `bench` finish their work and return its exit code
even when the reader of their output goes away, as in `hdexport build MODEL | head -1`.

## Completion in the shell

The tab key completes commands, options, their values and paths after one line in `~/.bashrc` or `~/.zshrc`:

```bash
eval "$(register-python-argcomplete hdexport)"
```

In fish: `register-python-argcomplete --shell fish hdexport | source`.
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
