"""Options that several commands take: their declarations and their values."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from hdruntime.backends.precision import Precision
from hdruntime.errors import InputError
from hdruntime.os_errors import explained

if TYPE_CHECKING:
    from hdexport.checkpoint.trust import Trust
    from hdexport.engines.build import EngineOptions
    from hdexport.quantize import Int8Options
    from hdruntime.bundle.manifest import Backend

_Options = TypeVar("_Options")

PRECISIONS = tuple(precision.value for precision in Precision)
"""Names of the precisions that a CPU computes in."""

_BOUNDS = ("min", "opt", "max")
_SHAPE_OPTIONS = ("profiles", "batch", *(f"{bound}Shapes" for bound in _BOUNDS))
_LARGEST = 2**53
"""Largest whole number of an option: more fits neither JSON nor every C library."""

_ENGINE_OPTIONS = (*_SHAPE_OPTIONS, "version_compatible", "sm", "attention_impl")


def add_attention_arguments(parser: argparse._ArgumentGroup, *, effect: str) -> None:
    """Declare ``--attention``, whose help begins with `effect`, and the options of attention types."""
    from hdexport.attention.registry import attention_types, cli_syntaxes

    examples = [f"{syntax.example}: {syntax.summary}" for syntax in cli_syntaxes().values()]
    parser.add_argument("--attention", metavar="SPEC", help="\n".join([f"{effect} For example:", *examples]))
    parser.add_argument(
        "--help-attention", action=_ShowSyntaxes, nargs=0, help="show every syntax of --attention with all parts"
    )
    for type_ in attention_types():
        type_.add_arguments(parser)


class _ShowSyntaxes(argparse.Action):
    """Prints the syntaxes of ``--attention`` and ends the command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from hdexport.attention.registry import cli_syntaxes

        width = shutil.get_terminal_size().columns - 2
        for syntax in cli_syntaxes().values():
            print(syntax.grammar)
            print(textwrap.indent(textwrap.fill(f"{syntax.help}.", width - 2), "  "))
        parser.exit()


def options_as(kind: type[_Options], options: argparse.Namespace, **values: Any) -> _Options:
    """A dataclass of options: each field is one of `values`, or else the command's option of that name."""
    names = [field.name for field in dataclasses.fields(kind) if field.name not in values]  # type: ignore[arg-type]
    return kind(**values, **{name: getattr(options, name) for name in names})


def command_line(arguments: Sequence[str]) -> str:
    """The command of these words for the record, as others may see it: bundles go to other machines."""
    from hdexport.support.redaction import redact_argument

    return shlex.join(["hdexport", *map(redact_argument, arguments)])


def add_revision_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--revision``."""
    parser.add_argument(
        "--revision",
        metavar="REV",
        help="branch, tag or commit of a MODEL on the Hugging Face Hub, also as organisation/name@REV (default: main)",
    )


def add_tokenizer_argument(parser: argparse._ActionsContainer) -> None:
    """Declare ``--tokenizer``, which says whose ids texts have."""
    from hdruntime.bundle.manifest import TokenizerSource

    parser.add_argument(
        "--tokenizer",
        choices=get_args(TokenizerSource),
        default="library",
        help="source of the token ids: library (default), the tokenizer class of transformers 5, as "
        "sentence-transformers uses it; file, tokenizer.json unchanged, as text-embeddings-inference, fastembed and "
        "transformers 4 use it. Choose file if a warning says that they differ and the model was trained with the file",
    )


def add_new_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what a command reads that writes a checkpoint with more positions: a model, its positions, the output."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=path_or_url,
        help="directory of a checkpoint, or organisation/name on the Hugging Face Hub",
    )
    parser.add_argument(
        "--max-len",
        metavar="TOKENS",
        type=whole_number,
        required=True,
        help="number of positions of the new checkpoint",
    )
    parser.add_argument("-o", "--output", metavar="DIR", type=local_path, required=True, help="directory to write")
    parser.add_argument("--force", action="store_true", help="replace the checkpoint at the output")
    add_revision_argument(parser)
    add_trust_arguments(parser)


def add_texts_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--texts``, which the command needs, and ``--text-column``."""
    parser.add_argument(
        "--texts",
        metavar="PATH",
        type=local_path,
        required=True,
        help="file of texts (.jsonl, .csv, .tsv, .parquet, or .txt with one text per line), or a folder of such "
        "files, in which each .txt, .md and .rst file is one text; also .gz and .zst",
    )
    parser.add_argument("--text-column", metavar="NAME", help="column of the text (default: text)")


def add_trust_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--allow-pickle`` and ``--trust-remote-code``, by which code of a checkpoint may run."""
    parser.add_argument(
        "--allow-pickle", action="store_true", help="allow weights in pickle files (.bin), which can run code"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python files of the checkpoint: sentence-transformers modules, the tokenizer, the model. A model "
        "whose outputs differ from the class of transformers is rejected",
    )


def trust_of(options: argparse.Namespace) -> Trust:
    from hdexport.checkpoint.trust import Trust

    return Trust(allow_pickle=options.allow_pickle, trust_remote_code=options.trust_remote_code)


def add_precision_argument(parser: argparse._ActionsContainer, **options: Any) -> None:
    """Declare ``--precision`` of a session; `options` replace those of argparse."""
    from hdruntime.backends.registry import computing_in

    library = computing_in(Precision.BFLOAT16)[0].library
    how: dict[str, Any] = {"choices": PRECISIONS, "default": "auto"} | options
    parser.add_argument(
        "--precision",
        **how,
        help=f"precision on a CPU; bfloat16 needs a CPU with bfloat16 units, and {library} unless the CPU is ARM; int8 "
        "needs a bundle built with --int8. auto (default): "
        f"bfloat16 if {library} runs a bundle built with --bf16 or --fp16 on a CPU with bfloat16 units, else float32",
    )


def add_position_arguments(parser: argparse._ActionsContainer, *, alpha: str) -> None:
    """Declare ``--positions`` and ``--alpha``; `alpha` says what ``auto`` means."""
    from hdruntime.bundle.manifest import Scheme

    parser.add_argument(
        "--positions",
        choices=[str(scheme) for scheme in Scheme],
        default="hierarchical",
        help="method that makes positions beyond the checkpoint's (default: hierarchical); see docs/positions.md",
    )
    parser.add_argument(
        "--alpha",
        type=_alpha,
        metavar="A",
        help="weight of the coarse position in hierarchical positions, between 0 and 1 but not 0.5, or auto "
        f"(default: auto, {alpha})",
    )


def _alpha(text: str) -> float | None:
    try:
        return None if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is neither a number nor auto") from None


def add_attention_scale_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--attention-scale",
        choices=["auto", "logn", "none"],
        default="auto",
        help="logn multiplies queries by max(1, ln n / ln L), with n attended tokens and L trained positions, so that "
        "attention over longer texts stays sharp; auto (default): logn for embeddings with --max-len above L, else "
        "none",
    )


def add_verify_memory_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--verify-memory``, in bytes."""
    parser.add_argument(
        "--verify-memory",
        metavar="GB",
        type=gigabytes,
        help="memory for the weights of a session in the comparison with PyTorch; graphs that need more are compared "
        "in parts, or skipped if their precision is not float32 (default: the free memory less a fifth)",
    )


def gigabytes(text: str) -> int:
    """A number of gigabytes above 0, in bytes."""
    try:
        size = int(float(text) * 1e9)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of gigabytes above 0, such as 8")
    return size


def add_int8_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--int8`` and ``--calibrate``, which `int8_options` reads."""
    parser.add_argument(
        "--int8",
        action="store_true",
        help="also write graphs with int8 linear layers for CPUs, for --precision int8: faster, with slightly "
        "different outputs",
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        type=local_path,
        help="calibration texts for --int8, similar to the texts in production: a .jsonl, .csv, .tsv, .parquet or "
        ".txt file with one text per row or line, or a folder of them; the first 64 are used, in several lengths "
        "(default: English texts that ship with Python)",
    )


def int8_options(options: argparse.Namespace) -> Int8Options | None:
    """The options of int8 graphs; None for no int8 graphs, where there must be nothing to calibrate with."""
    from hdexport.quantize import Int8Options

    if options.calibrate is not None and not options.int8:
        raise InputError(
            "--calibrate is for int8 graphs, which are built with --int8.", hint="Add --int8, or leave it out."
        )
    return Int8Options(calibrate=options.calibrate) if options.int8 else None


def rope_factor(text: str) -> float:
    """The factor of a value ``ntk:FACTOR``, finite and above 1; for argparse's ``type``."""
    method, _, number = text.partition(":")
    try:
        factor = float(number) if method == "ntk" else math.nan
    except ValueError:
        factor = math.nan
    if not 1 < factor < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not ntk:FACTOR with a FACTOR above 1, such as ntk:4")
    return factor


def add_max_seq_length_argument(parser: argparse._ActionsContainer, **options: Any) -> None:
    """Declare ``--max-seq-length`` of a session; `options` replace those of argparse."""
    how: dict[str, Any] = {"metavar": "N", "type": sequence_length} | options
    parser.add_argument(
        "--max-seq-length",
        **how,
        help="maximum tokens of a text, special tokens included, and of each chunk of a split text: a number, model "
        "for the model's own length, or bundle for the longest that the bundle runs (default: the build's --max-len, "
        "or else the model's own length)",
    )


def sequence_length(text: str) -> int | str:
    """A number of tokens, ``model`` or ``bundle``; for argparse's ``type``."""
    if text in ("model", "bundle"):
        return text
    try:
        return whole_number(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, model or bundle") from None


def whole_number(text: str, *, minimum: int = 1, maximum: int = _LARGEST) -> int:
    """An option's value as a whole number from `minimum` to `maximum`; for argparse's ``type``."""
    try:
        number = int(text)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number, {minimum} or more")
    if number > maximum:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number from {minimum} to {maximum}")
    return number


def local_path(text: str) -> Path:
    """A path on this machine, which need not be there; for argparse's ``type``."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text!r:.300} is a URL; give a path on this machine")
    return Path(path_or_url(text))


def path_or_url(text: str) -> str:
    """A path, a URL, or a name on the Hugging Face Hub; for argparse's ``type``.

    What no system call takes as a path is rejected here, and a path that leads through a link to itself or a folder
    without permission. Whether a file is there, and which, is for the command to say.
    """
    if not text:
        raise argparse.ArgumentTypeError("'' is no path; give one, or leave the option out")
    if "://" in text:
        return text
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        reason = " ".join(explained(error, otherwise="Check the path.").split("\n"))
        raise argparse.ArgumentTypeError(f"{text!r:.300} cannot be opened: {reason}") from None
    except ValueError as error:  # a byte 0, or characters that are none
        raise argparse.ArgumentTypeError(f"{text!r:.300} is no path: {error}; give one without it") from None
    return text


def add_engine_arguments(engines: argparse._ArgumentGroup) -> None:
    """Declare the options that describe an engine, all but ``--target``."""
    engines.add_argument(
        "--profiles",
        metavar="N,N,...",
        help="maximum input length of each profile (default: 128,512,1024,2048,... max_len; for ALBERT max_len only, "
        "as each profile doubles its engine)",
    )
    engines.add_argument("--batch", metavar="MIN:OPT:MAX", help="batch sizes of every profile (default: 1:1:8)")
    for bound in _BOUNDS:
        engines.add_argument(
            f"--{bound}Shapes",
            action="append",
            default=[],
            metavar="SHAPES",
            help=f"{bound} shapes of a profile in the syntax of trtexec, e.g. input_ids:1x128,attention_mask:1x128; "
            "repeat for each profile",
        )
    engines.add_argument(
        "--attention-impl",
        choices=["auto", "plugin", "native"],
        help="implementation of attention on a GPU: plugin, hdexport's kernels; native, standard operators; auto "
        "(default), plugin, but for dense attention in ONNX Runtime only where it is known to be faster",
    )
    engines.add_argument(
        "--sm",
        metavar="SM,SM,...",
        help="GPU architectures of engines and attention kernels, e.g. 86,90 (default: all that TensorRT-RTX "
        "supports, and the GPUs of this machine)",
    )
    engines.add_argument(
        "--version-compatible",
        action="store_true",
        help="build a TensorRT engine that later TensorRT versions and the lean runtime can run; it may be slower",
    )


def engine_options(
    options: argparse.Namespace,
    variants: Sequence[Backend],
    *,
    max_len: int,
    one_profile: bool,
    previous: EngineOptions | None,
) -> EngineOptions:
    """The engines of these variants that the options ask for, for inputs of at most so many tokens.

    With ``--batch`` alone, all lengths have one profile if `one_profile`, else there is one per bucket of lengths.
    Options that are left out have the values of `previous`; None for the defaults.
    """
    from hdexport.engines.build import EngineOptions
    from hdexport.graph.targets.tensorrt.lowering import AttentionImpl
    from hdexport.graph.targets.tensorrt.packages import architectures_from_option
    from hdexport.graph.targets.tensorrt.profiles import profiles_from_options

    previous, impl = previous or EngineOptions(), options.attention_impl
    profiles = previous.profiles
    if any(map(_is_given, (getattr(options, name) for name in _SHAPE_OPTIONS))):
        profiles = profiles_from_options(
            max_len,
            profiles=options.profiles,
            batch=options.batch,
            min_shapes=options.minShapes,
            opt_shapes=options.optShapes,
            max_shapes=options.maxShapes,
            one_profile=one_profile,
        )
    return EngineOptions(
        variants=tuple(variants),
        attention_impl=previous.attention_impl if impl is None else AttentionImpl(impl),
        profiles=profiles,
        architectures=architectures_from_option(options.sm) or previous.architectures,
        version_compatible=options.version_compatible or previous.version_compatible,
    )


def _is_given(value: object) -> bool:
    """Whether an option has a value; '' is one."""
    return value not in (None, False, [])


def reject_engine_options(options: argparse.Namespace, *, why: str, kernels: Sequence[str] = ()) -> None:
    """Reject options that describe an engine where none is built, and say why that is, but for `kernels`, those that
    kernels without an engine have."""
    used = [
        f"--{name.replace('_', '-')}"
        for name in _ENGINE_OPTIONS
        if name not in kernels and _is_given(getattr(options, name))
    ]
    if used:
        raise InputError(
            f"{', '.join(used)} describes an engine, but no engine is built: {why}.",
            hint="Leave it out, or ask for an engine: --target tensorrt-rtx",
        )
