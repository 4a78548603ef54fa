"""What ``--attention`` asks for: windowed attention in place of a model's dense one."""

from __future__ import annotations

__all__ = ["GRAMMAR", "check_window", "window_from_spec"]

import logging

from hdexport.families import SUPPORTED_MODEL_TYPES, Family, family_of
from hdexport.global_attention import MOST_GLOBAL_TOKENS
from hdruntime.errors import InputError, ModelError
from hdruntime.manifest import Window

logger = logging.getLogger(__name__)

GRAMMAR = "window:W[,global:G][,dilation:D[/D...]]"
"""Form of the option's value."""

_EXAMPLE = "--attention window:256,global:1"


def window_from_spec(spec: str) -> Window:
    """Read the option's value.

    Args:
        spec: of the form `GRAMMAR`, e.g. ``window:256,global:1``.

    Raises:
        InputError: it is not of that form, or a number is out of its range.
    """
    given: dict[str, str] = {}
    for part in spec.split(","):
        name, colon, value = part.partition(":")
        if not colon or name in given or name not in ("window", "global", "dilation"):
            raise InputError(_not_understood(spec, part))
        given[name] = value
    if "window" not in given:
        raise InputError(_not_understood(spec, spec))
    return Window(
        tokens=_number(spec, "window", given["window"], least=1, most=None),
        global_tokens=_number(spec, "global", given.get("global", "1"), least=0, most=MOST_GLOBAL_TOKENS),
        dilation=tuple(_number(spec, "dilation", step, least=1, most=None) for step in _steps(given)),
    )


def check_window(window: Window, family: Family, *, model_type: str, heads: int, max_len: int) -> None:
    """Refuse a window that a model cannot have, and warn of one that changes nothing.

    Args:
        window: what was asked for.
        family: of the model.
        model_type: of the model, for the message.
        heads: of each layer.
        max_len: the longest input, in tokens.

    Raises:
        ModelError: the family cannot be windowed.
        InputError: there is not one dilation a head.
    """
    if family.why_not_windowed is not None:
        able = (name for name in SUPPORTED_MODEL_TYPES if family_of(name).why_not_windowed is None)
        raise ModelError(
            f"{model_type} cannot be given windowed attention: {family.why_not_windowed}.\n"
            f"Leave out --attention. Families that can: {', '.join(able)}."
        )
    if len(window.dilation) not in (1, heads):
        raise InputError(
            f"--attention has {len(window.dilation)} dilations, and the model has {heads} heads in each layer.\n"
            f"Give one for all heads, dilation:2, or {heads}, separated by slashes."
        )
    if window.tokens >= max_len - 1:
        logger.warning(
            "A window of %d tokens on each side covers every text of up to %d tokens: the attention is dense.",
            window.tokens,
            max_len,
        )


def _steps(given: dict[str, str]) -> list[str]:
    return given.get("dilation", "1").split("/")


def _number(spec: str, name: str, text: str, *, least: int, most: int | None) -> int:
    try:
        number = int(text)
    except ValueError:
        raise InputError(_not_understood(spec, f"{name}:{text}")) from None
    if number < least or (most is not None and number > most):
        range_ = f"{least} or more" if most is None else f"{least} to {most}"
        raise InputError(f"--attention {spec} asks for {name} {number}; it must be {range_}.\nFor example: {_EXAMPLE}")
    return number


def _not_understood(spec: str, part: str) -> str:
    return (
        f"--attention {spec} is not understood at {part!r}.\nIts form is {GRAMMAR}: W tokens on each side of a query "
        f"(Longformer's attention_window counts both), the first G tokens global, a dilation for all heads or one a "
        f"head.\nFor example: {_EXAMPLE}"
    )
