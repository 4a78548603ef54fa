"""The command line: one file a command."""

from __future__ import annotations

__all__ = ["COMMANDS", "main", "parser"]

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

from hdexport.cli.arguments import command_line
from hdruntime.errors import HdexportError, InputError
from hdruntime.optional import missing_dependency

COMMANDS = ("build", "rebuild", "extend", "inspect", "verify", "run", "bench", "package", "doctor")
"""Each is a module of this package with ``SUMMARY``, ``add_arguments(parser)`` and ``run(options) -> int``."""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are ordinary errors of ours: exit code 1, no usage dump."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}\nSee: {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the installed ``hdexport`` is this function.

    Args:
        arguments: what follows ``hdexport`` on the command line; default ``sys.argv[1:]``.

    Returns:
        The exit code: 0 done, 1 a known error, 2 done but rows failed, 130 interrupted, 143 terminated.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    debug = "--debug" in arguments
    try:
        options = parser().parse_args(arguments)
        options.command_line = command_line(arguments)
        logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
        for package in ("hdexport", "hdruntime", "hdplugins"):
            # Ours only: torch, transformers and httpx would drown it.
            logging.getLogger(package).setLevel(
                logging.DEBUG if debug else logging.INFO if options.verbose else logging.WARNING
            )
        # Only the command that runs is imported with what it needs; `--help` and `doctor` stay fast.
        code: int = options.command_module.run(options)
    except (HdexportError, ModuleNotFoundError) as error:
        # Modules that need torch import it at their top: there, too, it may be missing on a machine that only runs.
        known = missing_dependency(error) if type(error) is ModuleNotFoundError else error
        if debug or known is None:
            raise
        print(f"error: {known}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`hdexport inspect | head`): not an error of ours.
        sys.stderr.close()
        return 0
    except (OSError, MemoryError) as error:
        # A disk, a permission, a limit of the machine: no more a mistake of ours than a bad option is.
        if debug:
            raise
        print(f"error: {error or 'out of memory'}\nTo see where it happened, add --debug.", file=sys.stderr)
        return 1
    return code


def parser() -> argparse.ArgumentParser:
    """The whole command line, as an argument parser."""
    top = _Parser(
        prog="hdexport",
        description="Deploy long-document encoder transformers, right at every length.",
    )
    from hdexport import __version__

    top.add_argument("--version", action="version", version=f"hdexport {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    for name in COMMANDS:
        module = importlib.import_module(f"hdexport.cli.{name}")
        command = commands.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        module.add_arguments(command)
        command.add_argument("-v", "--verbose", action="store_true", help="log what is done and why")
        command.add_argument("--debug", action="store_true", help="log everything; show tracebacks")
        command.set_defaults(command_module=module)
    return top
