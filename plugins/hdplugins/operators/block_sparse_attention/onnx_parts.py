"""What bodies of block-sparse attention are made of, and the attention that all have in common."""

from __future__ import annotations

__all__ = ["Parts", "ends_of_texts", "listing", "longest_dense", "shifts", "sparse_attention"]

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hdplugins.operators.onnx_text import attention


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a body is made of.

    Attributes:
        first: the first blocks are global.
        last: so is the last one.
        window: blocks on each side that are seen; -1 for none, not even the query's own.
        repeats: block 0 is seen (once more), though it is not global.
        dense: short texts are attended to densely.
        by_row: texts end after their own last real token, and that matters.
        listed: a table lists blocks.
    """

    first: bool
    last: bool
    window: int
    repeats: bool
    dense: bool
    by_row: bool
    listed: bool

    @classmethod
    def of(cls, attributes: Mapping[str, Any], *, listed: bool) -> Parts:
        first, last = attributes["first_global"] > 0, attributes["last_global"] > 0
        dense, window = attributes["dense_tokens"] > 0, max(attributes["window"], -1)
        repeats = attributes["first_repeats"] > 0 and not first
        if not (first or last or repeats or listed or window >= 0):
            raise ValueError(
                "Without global blocks, window, repeated blocks and a table, its queries see nothing: give it a table, "
                "or a window of 0 blocks or more."
            )
        return cls(
            first=first,
            last=last,
            window=window,
            repeats=repeats,
            dense=dense,
            by_row=attributes["ends_by_row"] > 0 and (last or dense),
            listed=listed,
        )

    @property
    def suffix(self) -> str:
        """What tells the name of this body from that of others."""
        present = {
            "first": self.first,
            "last": self.last,
            f"window{self.window}": self.window >= 0,
            "repeats": self.repeats,
            "dense": self.dense,
            "byrow": self.by_row,
            "listed": self.listed,
        }
        return "".join(f"_{part}" for part, is_there in present.items() if is_there)

    @property
    def front(self) -> bool:
        """Whether queries see blocks at the beginning wherever they are."""
        return self.first or self.repeats

    @property
    def global_rows(self) -> bool:
        """Whether the queries of some blocks see all keys."""
        return self.first or self.last

    @property
    def spans(self) -> list[str]:
        """The parts of a block's span of keys but the listed ones, in order."""
        present = {"front": self.front, "last": self.last, "near": self.window >= 0}
        return [part for part, is_there in present.items() if is_there]


def longest_dense(attributes: Mapping[str, Any], *, listed: bool) -> int:
    """Tokens up to which every query of a text sees every key once; 0 for none."""
    # Queries of global blocks see every key. So do others that are no further from each other than a window reaches,
    # unless something is seen again.
    blocks = attributes["first_global"] + attributes["last_global"]
    if not listed and attributes["first_repeats"] == 0:
        blocks += attributes["window"] + 1
    return int(max(attributes["dense_tokens"], attributes["block_size"] * blocks))


def ends_of_texts(parts: Parts) -> str:
    """Text that makes `ends`, [batch], behind the last token of each text, and `last_block`, [batch], where it counts.

    It reads `real`, [batch, tokens], `batch_1d`, `tokens`, `block`, and constants. A text of nothing but padding that
    ends after its own last real token has the last block -1.
    """
    return (_ENDS_BY_ROW if parts.by_row else _ENDS_TOGETHER) + (_LAST_BLOCK if parts.last else "")


def sparse_attention(parts: Parts, keys: str, values: str, bias: str, sums: str, *, axes: int) -> str:
    """Text of the attention of `block_query` over the spans of its blocks; names as in `attention`."""
    if parts.window >= 0:
        return attention("block_query", keys, values, bias, sums, axes=axes)
    seen = attention("block_query", keys, values, bias, f"seen_{sums}", axes=axes)
    return seen + _DROP_UNSEEN.format(bias=bias, sums=sums)


def shifts(wide: str, near: str, window: int, *, axis: int) -> str:
    """Text that joins, for every block, its neighbours along the axis after the blocks' own."""
    text, axis_name = "", {1: "one_1d", 2: "two_1d"}[axis]
    for shift in range(2 * window + 1):
        text += f"""
    {near}_start_{shift} = Constant <value_ints = [{shift}]> ()
    {near}_end_{shift} = Add ({near}_start_{shift}, blocks_1d)
    {near}_{shift} = Slice ({wide}, {near}_start_{shift}, {near}_end_{shift}, {axis_name})
"""
    return text + f"{near} = Concat <axis = {axis + 1}> ({listing(f'{near}_{{}}', range(2 * window + 1))})\n"


def listing(pattern: str, values: Iterable[object]) -> str:
    return ", ".join(pattern.format(value) for value in values)


# A query that sees no key, which happens only without a window, is 0.
_DROP_UNSEEN = """
    bias_axis = Constant <value_ints = [-1]> ()
    best_score = ReduceMax <keepdims = 1> ({bias}, bias_axis)
    unseen_score = Constant <value_float = -1.0e29> ()
    sees_any = Greater (best_score, unseen_score)
    no_score = Constant <value_float = 0.0> ()
    no_sum = CastLike (no_score, query)
    {sums} = Where (sees_any, seen_{sums}, no_sum)
"""

_ENDS_TOGETHER = """
    ends = Expand (tokens, batch_1d)
"""

_ENDS_BY_ROW = """
    behind = Add (tokens, one)
    ordinals = Range (one, behind, one)
    real_numbers = Cast <to = 7> (real)
    real_ordinals = Mul (real_numbers, ordinals)
    ends = ReduceMax <keepdims = 0> (real_ordinals, one_1d)
"""

_LAST_BLOCK = """
    rounding = Sub (block, one)
    rounded_ends = Add (ends, rounding)
    ended_blocks = Div (rounded_ends, block)
    last_block = Sub (ended_blocks, one)
"""
