"""Nodes of operators on strings, and sentinels in texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import onnx_ir as ir

from hdplugins.op_builder import OpBuilder
from hdruntime.errors import InputError, Setting

DOMAIN = "ai.onnx.contrib"
INT64 = 7
"""ONNX's number of the type."""

TEXT, BREAK, OPEN, CLOSE, OTHER = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
"""Sentinels, noncharacters of Unicode: the start of a text; the end of a word; the start and the end of a special
token's id; a noncharacter that was in a text."""

SENTINELS = re.compile(f"[{TEXT}-{CLOSE}]")

SPACES = r"[\t-\r \x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}]"
"""White space as the tokenizers library counts it."""

Encode = Callable[[OpBuilder, "ir.Value"], "tuple[ir.Value, ir.Value]"]
"""Writes the nodes that split segments of texts, ``[segments]``, into token ids: the ids and the segment of each, both
``[tokens]``, in order."""

Rewrites = tuple[tuple[str, str], ...]
"""Patterns of RE2 and what replaces their matches, in order."""


def unsupported(reason: str) -> InputError:
    """The error for a tokenizer that has no operators."""
    return InputError(
        f"onnxruntime-extensions cannot tokenize as this bundle does: {reason}.",
        hint=("Package the graph alone, and tokenize outside of it: ", Setting("target", "onnx")),
    )


def token_sentinel(number: int) -> str:
    """The sentinels of a special token, with its id between them."""
    return f"{OPEN}{number}{CLOSE}"


def literal(text: str) -> str:
    """A text as a pattern of RE2."""
    return "".join(letter if letter.isalnum() else f"\\x{{{ord(letter):X}}}" for letter in text)


def strings(op: OpBuilder, *values: str) -> ir.Value:
    return op.Constant(value=ir.StringTensor([value.encode() for value in values], shape=ir.Shape([len(values)])))


def replace(op: OpBuilder, text: ir.Value, pattern: str, replacement: str) -> ir.Value:
    """Replace all matches of a pattern of RE2 in each string."""
    return op.call(
        "StringRegexReplace", text, strings(op, pattern), strings(op, replacement), _domain=DOMAIN, global_replace=1
    )


def join(op: OpBuilder, texts: ir.Value, separator: str) -> ir.Value:
    """One string of all, ``[1]``."""
    axis = op.Constant(value=ir.tensor([0], ir.DataType.INT64))
    return op.call("StringJoin", texts, strings(op, separator), axis, _domain=DOMAIN)


def split(op: OpBuilder, text: ir.Value, pattern: str) -> ir.Value:
    """Matches of a pattern in one string, and what is between them, ``[segments]``; no segment is empty."""
    segments, *_ = op.call(
        "StringRegexSplitWithOffsets",
        text,
        strings(op, f"({pattern})"),
        strings(op, "(?s:.*)"),
        _domain=DOMAIN,
        _outputs=4,
    )
    return segments


def map_strings(op: OpBuilder, texts: ir.Value, values: Mapping[str, str]) -> ir.Value:
    """Replace strings that are keys by their values."""
    lines = "\n".join(f"{key}\t{value}" for key, value in values.items())
    return op.call("StringMapping", texts, _domain=DOMAIN, map=lines)


def count_before(op: OpBuilder, starts: ir.Value, size: ir.Value) -> ir.Value:
    """Number of `starts` up to each of `size` places, ``[size]``; places of `starts` may be equal, or `size`."""
    ones = op.Expand(1, op.Shape(starts))
    begun = op.ScatterElements(op.Expand(0, op.Add(size, 1)), starts, ones, axis=0, reduction="add")
    return op.Slice(op.CumSum(begun, 0), [0], [-1])
