"""Options that several commands take: their declarations and their values."""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdexport.support.published import published_argument
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Scheme
from hdruntime.errors import InputError

if TYPE_CHECKING:
    from hdexport.checkpoint.trust import Trust
    from hdexport.quantize.options import Int8Options

PRECISIONS = tuple(precision.value for precision in Precision)
"""Names of the precisions that a CPU computes in."""


def add_attention_arguments(parser: argparse._ArgumentGroup, *, effect: str) -> None:
    """Declare ``--attention``, ``--help-attention``, and the options of the kinds of attention.

    Args:
        parser: the options' group.
        effect: what the option does, a sentence.
    """
    from hdexport.attention.kinds import forms, kinds

    examples = [f"{form.example}: {form.summary}" for form in forms().values()]
    parser.add_argument("--attention", metavar="SPEC", help="\n".join([f"{effect} For example:", *examples]))
    parser.add_argument(
        "--help-attention", action=_ShowForms, nargs=0, help="show every form of --attention with all its parts"
    )
    for kind in kinds():
        kind.add_arguments(parser)


class _ShowForms(argparse.Action):
    """Prints the forms of ``--attention`` and ends the command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from hdexport.attention.kinds import forms

        width = shutil.get_terminal_size().columns - 2
        for form in forms().values():
            print(form.grammar)
            print(textwrap.indent(textwrap.fill(f"{form.help}.", width - 2), "  "))
        parser.exit()


def command_line(arguments: Sequence[str]) -> str:
    """The command for the record, as others may see it: bundles go to other machines.

    Args:
        arguments: the words after ``hdexport``.
    """
    return shlex.join(["hdexport", *map(published_argument, arguments)])


def add_revision_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--revision``."""
    parser.add_argument(
        "--revision",
        metavar="REV",
        help="branch, tag or commit of a MODEL on the hub (default: its main branch), as in organisation/name@REV",
    )


def add_trust_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--allow-pickle`` and ``--trust-remote-code``, by which code of a checkpoint may run."""
    parser.add_argument("--allow-pickle", action="store_true", help="also read weights stored as a pickle (.bin)")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the checkpoint's own Python files: sentence-transformers modules, the tokenizer, and the model; a "
        "model that answers otherwise than the class that bundles are made of is refused",
    )


def trust_of(options: argparse.Namespace) -> Trust:
    """The options of `add_trust_arguments`."""
    from hdexport.checkpoint.trust import Trust

    return Trust(pickles=options.allow_pickle, code=options.trust_remote_code)


def add_precision_argument(parser: argparse._ActionsContainer) -> None:
    """Declare ``--precision`` of a session."""
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="auto",
        help="what a CPU computes in; bfloat16 needs OpenVINO, int8 a bundle built with --int8. auto (default): "
        "bfloat16 where OpenVINO runs a bundle of --bf16 or --fp16 on a CPU that computes in it, else float32",
    )


def add_position_arguments(parser: argparse._ActionsContainer, *, alpha: str) -> None:
    """Declare ``--positions`` and ``--alpha``.

    Args:
        alpha: what ``auto`` means, for the help.
    """
    parser.add_argument(
        "--positions",
        choices=[str(scheme) for scheme in Scheme],
        default="hierarchical",
        help="where positions past the checkpoint's come from (default: hierarchical); see docs/positions.md",
    )
    parser.add_argument(
        "--alpha",
        type=_alpha,
        metavar="A",
        help="weight of the coarse position, between 0 and 1 but not 0.5, or auto; hierarchical only (default: auto, "
        f"{alpha})",
    )


def _alpha(text: str) -> float | None:
    try:
        return None if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is neither a number nor auto") from None


def add_attention_scale_argument(parser: argparse._ActionsContainer) -> None:
    """Declare ``--attention-scale``."""
    parser.add_argument(
        "--attention-scale",
        choices=["auto", "logn", "none"],
        default="auto",
        help="logn multiplies queries by max(1, ln n / ln L), for n tokens that they see and the L positions that the "
        "model was trained with, so that attention over longer texts stays as sharp; auto (default) is logn for "
        "embeddings of texts past L, else none",
    )


def add_int8_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--int8`` and ``--calibrate``, which `int8_options` reads."""
    parser.add_argument(
        "--int8",
        action="store_true",
        help="also write graphs for CPUs whose products with weights are int8, for --precision int8: faster; answers "
        "differ slightly",
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        type=Path,
        help="with --int8: texts like those that will come, a .jsonl, .csv, .tsv, .parquet or .txt file with one text "
        "per row or line, or a folder of them; up to 64 are read (default: English texts that ship with Python)",
    )


def int8_options(options: argparse.Namespace) -> Int8Options | None:
    """The options of int8 graphs; None for no int8 graphs.

    Raises:
        InputError: there is something to calibrate with, and nothing to calibrate.
    """
    from hdexport.quantize.options import Int8Options

    if options.calibrate is not None and not options.int8:
        raise InputError("--calibrate is for int8 graphs, which are built with --int8.\nAdd --int8, or leave it out.")
    return Int8Options(calibrate=options.calibrate) if options.int8 else None


def rope_factor(text: str) -> float:
    """The factor of a value ``ntk:FACTOR``, finite and above 1; for argparse's ``type``."""
    method, _, number = text.partition(":")
    try:
        factor = float(number) if method == "ntk" else math.nan
    except ValueError:
        factor = math.nan
    if not 1 < factor < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not ntk:FACTOR with a FACTOR above 1, such as ntk:4")
    return factor


def whole_number(text: str, *, least: int = 1) -> int:
    """An option's value as a whole number, `least` or more; for argparse's ``type``."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number, {least} or more")
    return number
