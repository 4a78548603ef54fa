"""Options that describe engines, for the commands that build some."""

from __future__ import annotations

__all__ = ["add_engine_arguments", "engine_options", "refuse_engine_options"]

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
        metavar="IMPL",
        help="who computes windowed attention in an engine: plugin, our GPU kernels (default), or native, TensorRT "
        "itself from standard operators",
    )
    engines.add_argument(
        "--sm", metavar="SM,SM,...", help="GPU architectures, e.g. 86,89 (default: all that TensorRT-RTX supports)"
    )
    engines.add_argument(
        "--version-compatible",
        action="store_true",
        help="a TensorRT engine that later versions of TensorRT run, too, and its lean runtime; it may be slower",
    )


def engine_options(
    options: argparse.Namespace,
    flavours: Sequence[Backend],
    *,
    max_len: int,
    one_profile: bool,
    previous: EngineOptions | None,
) -> EngineOptions:
    """What the options ask for.

    Args:
        options: the parsed command line.
        flavours: of the engines.
        max_len: longest input of the bundle, in tokens.
        one_profile: by default one profile for all lengths, instead of one a bucket of lengths.
        previous: where what is left out is taken from; None for the defaults.

    Raises:
        InputError: a value is none that its option takes, or options contradict each other.
    """
    from hdexport.engines.build import EngineOptions
    from hdexport.engines.profiles import profiles_from_options
    from hdexport.engines.tensorrt_packages import architectures_from_option
    from hdexport.graph.lowering.tensorrt import attention_impl_from_name

    previous = previous or EngineOptions()
    profiles = previous.profiles
    if not profiles or any(getattr(options, name) for name in _SHAPE_OPTIONS):
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
        attention_impl=attention_impl_from_name(options.attention_impl or previous.attention_impl.value),
        profiles=profiles,
        architectures=architectures_from_option(options.sm) or previous.architectures,
        version_compatible=options.version_compatible or previous.version_compatible,
    )


def refuse_engine_options(options: argparse.Namespace, *, why: str) -> None:
    """Complain of options that describe an engine, where none is built.

    Args:
        options: the parsed command line.
        why: there is none.

    Raises:
        InputError: one of them was given.
    """
    given = [f"--{name.replace('_', '-')}" for name in _ENGINE_OPTIONS if getattr(options, name)]
    if given:
        raise InputError(
            f"{', '.join(given)} describes an engine, and none is built: {why}.\n"
            "Leave it out, or ask for an engine: --target tensorrt-rtx"
        )
