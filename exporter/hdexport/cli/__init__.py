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
from hdexport.cli.interruption import exit_code, stopped_like_interrupted
from hdexport.cli.memory_errors import interrupted_by_openblas, want_of_memory
from hdexport.cli.streams import complain, finish_output, prepare_streams, reader_is_gone
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
        The exit code: 0 done, 1 a known error, 2 done but rows failed; 130 interrupted, 143 terminated, 129 hung up.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    debug = "--debug" in arguments
    try:
        prepare_streams()
        with stopped_like_interrupted():
            code = _run(arguments, debug=debug)
            sys.stdout.flush()
    except KeyboardInterrupt as stop:
        openblas = interrupted_by_openblas()
        complain("interrupted" if openblas is None else f"error: {openblas}")
        code = exit_code(stop) if openblas is None else 1
    except Exception as error:
        message = _message(error)
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            code = 0  # who read our output had enough (`hdexport inspect | head`)
        elif debug or message is None:
            raise
        else:
            complain(f"error: {message}")
            code = 1
    finish_output()
    return code


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The command line, as an argument parser.

    Args:
        arguments: what it is for: commands that none of these words names have no arguments of their own, for some of
            them load much to know theirs.
    """
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
        if name in arguments:
            module.add_arguments(command)
        command.add_argument("-v", "--verbose", action="store_true", help="log what is done and why")
        command.add_argument("--debug", action="store_true", help="log everything; show tracebacks")
        command.set_defaults(command_module=module)
    return top


def _run(arguments: Sequence[str], *, debug: bool) -> int:
    try:
        options = parser(arguments).parse_args(arguments)
    except SystemExit as end:  # after --help and --version
        return int(end.code or 0)
    options.command_line = command_line(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    for package in ("hdexport", "hdruntime", "hdplugins"):
        # Ours only: torch, transformers and httpx would drown it.
        logging.getLogger(package).setLevel(
            logging.DEBUG if debug else logging.INFO if options.verbose else logging.WARNING
        )
    # Only the command that runs is imported with what it needs; `--help` and `doctor` stay fast.
    code: int = options.command_module.run(options)
    return code


def _message(error: Exception) -> str | None:
    """What is said of an error; None of those that are mistakes of ours."""
    if isinstance(error, HdexportError):
        return str(error)
    if type(error) is ModuleNotFoundError:
        # Modules that need torch import it at their top: there, too, it may be missing on a machine that only runs.
        missing = missing_dependency(error)
        return None if missing is None else str(missing)
    short = want_of_memory(error)
    if short is None and isinstance(error, OSError):
        # A disk, a permission: no more a mistake of ours than a bad option is.
        return f"{error}\nTo see where it happened, add --debug."
    return short
