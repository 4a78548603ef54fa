"""What ``--attention`` asks for: windowed or block-sparse attention in place of a model's dense one."""

from __future__ import annotations

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "DEFAULT_RANDOM_BLOCKS",
    "GRAMMAR",
    "BlockRequest",
    "attention_from_spec",
    "check_convertible",
    "check_window",
]

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hdexport.attention.window.marks import MOST_GLOBAL_TOKENS
from hdexport.families import SUPPORTED_MODEL_TYPES, Family, family_of
from hdruntime.bundle.manifest import BlockKind, BlockMode, Window
from hdruntime.errors import InputError, ModelError

logger = logging.getLogger(__name__)

GRAMMAR = {
    "window": "window:W[,global:G][,dilation:D[/D...]]",
    "bigbird": "bigbird[:block=B,random=R,mode=hf_eval|table,seed=S,table=FILE.npy]",
    "etc": "etc:global=G[,block=B,tokens=ID[/ID...]]",
    "blocks": "blocks:file=FILE.npz,block=B",
}
"""Kind of attention -> form of the option's value."""

_EXAMPLES = {
    "window": "window:256,global:1",
    "bigbird": "bigbird:block=64,random=3",
    "etc": "etc:global=64,block=64",
    "blocks": "blocks:file=pattern.npz,block=64",
}

_MODES: tuple[BlockMode, ...] = ("hf_eval", "table")

DEFAULT_BLOCK_SIZE = 64
"""BigBird's, in tokens."""

DEFAULT_RANDOM_BLOCKS = 3
"""BigBird's."""


@dataclass(frozen=True, kw_only=True)
class BlockRequest:
    """Block-sparse attention, as it was asked for; None where nothing was said.

    Attributes:
        kind: ``bigbird``, ``etc`` or ``blocks``.
        block_size: tokens of a block.
        random_blocks: of each row of blocks, for ``bigbird``.
        mode: ``hf_eval`` or ``table``, for ``bigbird``.
        seed: of the random tables: layer l draws with seed + l.
        file: of the tables (``bigbird``), or of the lists of blocks (``blocks``).
        global_tokens: in front of each text, for ``etc``.
        global_ids: ids whose embeddings the global tokens get, one for all or one each; () for the model's first
            special token.
    """

    kind: BlockKind
    block_size: int | None = None
    random_blocks: int | None = None
    mode: BlockMode | None = None
    seed: int | None = None
    file: Path | None = None
    global_tokens: int = 0
    global_ids: tuple[int, ...] = ()


def attention_from_spec(spec: str) -> Window | BlockRequest:
    """Read the option's value.

    Args:
        spec: of one of the forms of `GRAMMAR`, e.g. ``window:256,global:1``.

    Raises:
        InputError: it is not of such a form, or a number is out of its range.
    """
    kind, colon, parts = spec.partition(":")
    if kind == "bigbird":
        return _bigbird(spec, _named(spec, kind, parts, "=") if colon else {})
    if kind == "etc":
        return _etc(spec, _named(spec, kind, parts, "="))
    if kind == "blocks":
        return _blocks(spec, _named(spec, kind, parts, "="))
    return _window(spec, _named(spec, "window", spec, ":"))


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
    check_convertible(family, model_type=model_type, to="windowed")
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


def check_convertible(family: Family, *, model_type: str, to: str) -> None:
    """Refuse a model whose attention cannot be exchanged.

    Args:
        family: of the model.
        model_type: of the model, for the message.
        to: what it was to become, for the message.

    Raises:
        ModelError: it says why not, and which families can be.
    """
    if family.why_not_windowed is not None:
        able = (name for name in SUPPORTED_MODEL_TYPES if family_of(name).why_not_windowed is None)
        raise ModelError(
            f"{model_type} cannot be given {to} attention: {family.why_not_windowed}.\n"
            f"Leave out --attention. Families that can: {', '.join(able)}."
        )


_Given = Mapping[str, str]

_NAMES = {
    "window": ("window", "global", "dilation"),
    "bigbird": ("block", "random", "mode", "seed", "table"),
    "etc": ("global", "block", "tokens"),
    "blocks": ("file", "block"),
}


def _named(spec: str, kind: str, parts: str, sign: str) -> dict[str, str]:
    """Name -> value of the parts, which commas separate."""
    given: dict[str, str] = {}
    for part in parts.split(","):
        name, found, value = part.partition(sign)
        if not found or not value or name in given or name not in _NAMES[kind]:
            raise InputError(_not_understood(spec, part))
        given[name] = value
    return given


def _window(spec: str, given: _Given) -> Window:
    if "window" not in given:
        raise InputError(_not_understood(spec, spec))
    return Window(
        tokens=_number(spec, "window", given["window"], least=1),
        global_tokens=_number(spec, "global", given.get("global", "1"), least=0, most=MOST_GLOBAL_TOKENS),
        dilation=tuple(_number(spec, "dilation", step, least=1) for step in given.get("dilation", "1").split("/")),
    )


def _bigbird(spec: str, given: _Given) -> BlockRequest:
    asked = given.get("mode", "table" if "table" in given or "seed" in given else None)
    mode = next((known for known in _MODES if known == asked), None)
    if mode != asked:
        raise InputError(_not_understood(spec, f"mode={asked}"))
    if mode == "hf_eval" and ("table" in given or "seed" in given):
        raise InputError(
            f"--attention {spec} gives a table of random blocks, which mode=hf_eval has none of.\n"
            "Leave out mode, or say mode=table."
        )
    if "table" in given and "seed" in given:
        raise InputError(f"--attention {spec} gives a table and a seed to draw one with.\nLeave one of them out.")
    return BlockRequest(
        kind="bigbird",
        block_size=_optional(spec, "block", given, least=1),
        random_blocks=_optional(spec, "random", given, least=0),
        mode=mode,
        seed=_optional(spec, "seed", given, least=0, most=2**31 - 1),
        file=Path(given["table"]) if "table" in given else None,
    )


def _etc(spec: str, given: _Given) -> BlockRequest:
    if "global" not in given:
        raise InputError(_not_understood(spec, spec))
    tokens = _number(spec, "global", given["global"], least=1)
    ids = (
        tuple(_number(spec, "tokens", text, least=0) for text in given["tokens"].split("/"))
        if "tokens" in given
        else ()
    )
    if len(ids) not in (0, 1, tokens):
        raise InputError(
            f"--attention {spec} gives {len(ids)} ids for {tokens} global tokens.\n"
            f"Give one for all, tokens={ids[0]}, or {tokens}, separated by slashes."
        )
    return BlockRequest(
        kind="etc", block_size=_optional(spec, "block", given, least=1), global_tokens=tokens, global_ids=ids
    )


def _blocks(spec: str, given: _Given) -> BlockRequest:
    for name in _NAMES["blocks"]:
        if name not in given:
            raise InputError(_not_understood(spec, spec))
    block_size = _number(spec, "block", given["block"], least=1)
    return BlockRequest(kind="blocks", block_size=block_size, file=Path(given["file"]))


def _optional(spec: str, name: str, given: _Given, *, least: int, most: int | None = None) -> int | None:
    return _number(spec, name, given[name], least=least, most=most) if name in given else None


def _number(spec: str, name: str, text: str, *, least: int, most: int | None = None) -> int:
    try:
        number = int(text)
    except ValueError:
        raise InputError(_not_understood(spec, f"{name}:{text}")) from None
    if number < least or (most is not None and number > most):
        range_ = f"{least} or more" if most is None else f"{least} to {most}"
        raise InputError(
            f"--attention {spec} asks for {name} {number}; it must be {range_}.\n"
            f"For example: --attention {_example(spec)}"
        )
    return number


def _example(spec: str) -> str:
    return _EXAMPLES.get(spec.partition(":")[0], _EXAMPLES["window"])


def _not_understood(spec: str, part: str) -> str:
    forms = "\n".join(f"  {form}" for form in GRAMMAR.values())
    return (
        f"--attention {spec} is not understood at {part!r}.\nIts forms are\n{forms}\n"
        "with W tokens on each side of a query (Longformer's attention_window counts both) and the first G tokens "
        "global, a dilation for all heads or one a head; blocks of B tokens; G global tokens in front of each text.\n"
        f"For example: --attention {_example(spec)}"
    )
