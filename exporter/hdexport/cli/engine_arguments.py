"""Options that describe engines, for the commands that build some."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdruntime.errors import InputError

if TYPE_CHECKING:
    from hdexport.engines.build import EngineOptions
    from hdruntime.bundle.manifest import Backend

_BOUNDS = ("min", "opt", "max")
_SHAPE_OPTIONS = ("profiles", "batch", *(f"{bound}Shapes" for bound in _BOUNDS))
_ENGINE_OPTIONS = (*_SHAPE_OPTIONS, "sm", "attention_impl", "version_compatible")


def add_engine_arguments(engines: argparse._ArgumentGroup) -> None:
    """Declare the options that describe an engine, all but ``--target``."""
    engines.add_argument(
        "--profiles",
        metavar="N,N,...",
        help="longest input of each profile (default: 128,512,1024,2048,... max_len; for ALBERT, whose engine would "
        "double, max_len alone)",
    )
    engines.add_argument("--batch", metavar="MIN:OPT:MAX", help="batch sizes of every profile (default: 1:1:8)")
    for bound in _BOUNDS:
        engines.add_argument(
            f"--{bound}Shapes",
            action="append",
            default=[],
            metavar="SHAPES",
            help=f"a profile's {bound} shapes as trtexec takes them, e.g. input_ids:1x128,attention_mask:1x128; once "
            "for each profile",
        )
    engines.add_argument(
        "--attention-impl",
        choices=["plugin", "native"],
        help="what computes windows, blocks, chunks, hashes and distances in an engine: plugin (default), hdexport's "
        "kernels; native, TensorRT from standard operators",
    )
    engines.add_argument(
        "--sm", metavar="SM,SM,...", help="GPU architectures, e.g. 86,89 (default: all that TensorRT-RTX supports)"
    )
    engines.add_argument(
        "--version-compatible",
        action="store_true",
        help="make a TensorRT engine that later versions of TensorRT and its lean runtime can run; it may be slower",
    )


def engine_options(
    options: argparse.Namespace,
    flavours: Sequence[Backend],
    *,
    max_len: int,
    one_profile: bool,
    previous: EngineOptions | None,
) -> EngineOptions:
    """The engines that the options ask for.

    Args:
        options: the parsed command line.
        flavours: of the engines.
        max_len: longest input of the bundle, in tokens.
        one_profile: with ``--batch`` alone, one profile for all lengths, instead of one per bucket of lengths.
        previous: supplies the values of options that are left out; None for the defaults.

    Raises:
        InputError: an option does not take its value, or options contradict each other.
    """
    from hdexport.engines.build import EngineOptions
    from hdexport.graph.targets.tensorrt.lowering import AttentionImpl
    from hdexport.graph.targets.tensorrt.packages import architectures_from_option
    from hdexport.graph.targets.tensorrt.profiles import profiles_from_options

    previous = previous or EngineOptions()
    profiles = previous.profiles
    if any(getattr(options, name) for name in _SHAPE_OPTIONS):
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
        flavours=tuple(flavours),
        attention_impl=AttentionImpl(options.attention_impl or previous.attention_impl),
        profiles=profiles,
        architectures=architectures_from_option(options.sm) or previous.architectures,
        version_compatible=options.version_compatible or previous.version_compatible,
    )


def refuse_engine_options(options: argparse.Namespace, *, why: str) -> None:
    """Refuse options that describe an engine where no engine is built.

    Args:
        options: the parsed command line.
        why: no engine is built.

    Raises:
        InputError: such an option is given.
    """
    given = [f"--{name.replace('_', '-')}" for name in _ENGINE_OPTIONS if getattr(options, name)]
    if given:
        raise InputError(
            f"{', '.join(given)} describes an engine, but no engine is built: {why}.\n"
            "Leave it out, or ask for an engine: --target tensorrt-rtx"
        )
