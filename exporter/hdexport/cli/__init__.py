# PYTHON_ARGCOMPLETE_OK
"""The command line: one file per command."""

from __future__ import annotations

__all__ = ["COMMANDS", "main", "parser"]

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from hdexport.cli.arguments import command_line
from hdexport.cli.command_parser import CommandParser
from hdexport.cli.flags import flag
from hdexport.cli.process import (
    READER_GONE,
    complain,
    exit_code,
    finish_output,
    interrupted_by_openblas,
    prepare_streams,
    reader_is_gone,
    stopped_like_interrupted,
    want_of_memory,
)
from hdexport.support.process_settings import heed_quota
from hdruntime.errors import HdexportError, Setting
from hdruntime.optional import missing_dependency
from hdruntime.os_errors import explained

COMMANDS = (
    "build",
    "rebuild",
    "extend",
    "tune",
    "families",
    "inspect",
    "verify",
    "run",
    "serve",
    "quality",
    "bench",
    "package",
    "push",
    "doctor",
)
"""Each command is a module of this package with ``SUMMARY``, ``add_arguments(parser)`` and ``run(options) -> int``."""


class _ShowVersion(argparse.Action):
    """``--version``; argparse's own action would read the package's metadata for every command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from hdruntime import __version__

        print(f"hdexport {__version__}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, whose words are those after ``hdexport``; the installed ``hdexport`` is this function.

    Returns the exit code: 0 done, 1 a known error, 2 done but rows failed; 130 interrupted, 143 terminated, 129 hung
    up, 141 where the requested output could not be printed because its reader went away.
    """
    if "_ARGCOMPLETE" in os.environ:
        _complete(os.environ["COMP_LINE"])
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    debug = "--debug" in arguments
    heed_quota()
    try:
        prepare_streams()
        with stopped_like_interrupted():
            code = _run(arguments, debug=debug)
            sys.stdout.flush()
    except KeyboardInterrupt as stop:
        openblas = interrupted_by_openblas()
        complain(": ".join(["interrupted", *map(str, stop.args[1:])]) if openblas is None else f"error: {openblas}")
        code = exit_code(stop) if openblas is None else 1
    except Exception as error:
        message = _message(error)
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            code = READER_GONE
        elif debug or message is None:
            raise
        else:
            complain(f"error: {message}")
            code = 1
    finish_output()
    return code


def parser(
    arguments: Sequence[str], *, parser_class: type[argparse.ArgumentParser] = CommandParser
) -> argparse.ArgumentParser:
    """The command line, as an argument parser.

    Only the commands that the words name have their arguments declared, because some load much for that.
    """
    top = parser_class(
        prog="hdexport",
        description="Embed, rerank and classify long documents: build, verify, run and serve encoder models.",
    )
    top.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    _add_logging_arguments(top)
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=parser_class)
    for name in COMMANDS:
        module = importlib.import_module(f"hdexport.cli.{name}")
        command = commands.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        if name in arguments:
            module.add_arguments(command)
        _add_logging_arguments(command)
        command.set_defaults(command_module=module)
    return top


def _add_logging_arguments(command: argparse.ArgumentParser) -> None:
    """Before and after the name of the command; where they are left out, one parser must not undo the other's."""
    command.add_argument(
        "-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="log what is done and why"
    )
    command.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="log everything; show tracebacks"
    )


class _StandardError(logging.Handler):
    """Writes to the standard error of the moment: a process may run several commands, each with another."""

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple):
            record.args = tuple(flag(each) if isinstance(each, Setting) else each for each in record.args)
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def _complete(line: str) -> None:
    """Answer the shell that asks for completions, and end the process."""
    import argcomplete

    # A plain parser: a line that is not complete must not be rejected.
    argcomplete.autocomplete(parser(line.split(), parser_class=argparse.ArgumentParser))


def _run(arguments: Sequence[str], *, debug: bool) -> int:
    try:
        options = parser(arguments).parse_args(arguments, argparse.Namespace(verbose=False))
    except SystemExit as end:  # after --help and --version
        return int(end.code or 0)
    options.command_line = command_line(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", handlers=[_StandardError()])
    for package in ("hdexport", "hdruntime", "hdplugins"):
        # Not the loggers of torch, transformers and httpx, which log too much.
        logging.getLogger(package).setLevel(
            logging.DEBUG if debug else logging.INFO if options.verbose else logging.WARNING
        )
    # Only the command that runs imports what it needs; `--help` and `doctor` stay fast.
    return options.command_module.run(options)


def _message(error: Exception) -> str | None:
    """The message of an error; None for a mistake in hdexport, which shows its traceback."""
    if isinstance(error, HdexportError):
        return error.message(flag)
    if type(error) is ModuleNotFoundError:
        # Modules that need torch import it at their top; a machine that only runs bundles lacks it.
        missing = missing_dependency(error)
        return None if missing is None else str(missing)
    short = want_of_memory(error)
    if short is None and isinstance(error, OSError):
        if "No usable temporary directory" in str(error):
            return f"{error.strerror}.\nName a directory that can be written: TMPDIR=DIRECTORY hdexport ..."
        # A disk or a permission, not a mistake in hdexport.
        place = "" if error.filename is None else f"{error.filename}: "
        return f"{place}{explained(error, otherwise='To see where it happened, add --debug.')}"
    return short
