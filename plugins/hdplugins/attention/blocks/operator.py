"""Block-sparse attention: blocks of queries see the blocks around them, global blocks, and blocks that a table lists.

It is the attention of BigBird, with random blocks that are all block 0, as Hugging Face evaluates it, or listed in a
table; the attention of ETC, whose global tokens are the first blocks of the sequence; and the attention of any other
list of blocks. `reference` defines each
attribute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hdplugins.attention.operator import Operator, Range

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _Integers = npt.NDArray[np.int64]


def pairs(attributes: Mapping[str, Any], *, tokens: int, heads: int) -> int:
    """Queries with the keys of the blocks that they see; see `Operator.pairs`. A key that counts several times is one.

    Raises:
        ValueError: the table does not fit the heads.
    """
    import numpy as np

    if tokens <= attributes["dense_tokens"]:
        return heads * tokens * tokens
    block_size, first_global, last_global = (attributes[name] for name in ("block_size", "first_global", "last_global"))
    blocks = -(-tokens // block_size)
    sizes = np.full(blocks, block_size, np.int64)
    sizes[-1] = tokens - block_size * (blocks - 1)
    seen = _seen_by_rule(blocks, first_global, last_global, attributes["window"], attributes["first_repeats"])[None]
    if attributes.get("listed_blocks") is not None:
        listed = _listed(np.asarray(attributes["listed_blocks"], np.int64), heads, blocks, first_global)
        seen = np.concatenate([np.repeat(seen, len(listed), axis=0), listed], axis=2)
    keys = _keys(seen, sizes)  # [1 or heads, blocks]
    is_global = np.arange(blocks) < first_global
    is_global[-1] |= bool(last_global)
    keys[:, is_global] = tokens
    return int((keys * sizes).sum()) * (heads // len(keys))


def _seen_by_rule(blocks: int, first_global: int, last_global: int, window: int, first_repeats: int) -> _Integers:
    """[blocks, seen], what each block of queries sees without the table; there may be repeats, and blocks out of it."""
    import numpy as np

    number = np.arange(blocks, dtype=np.int64)[:, None]
    always = [*range(max(first_global, min(first_repeats, 1))), *([blocks - 1] if last_global else [])]
    near = number + np.arange(-window, window + 1)
    return np.concatenate([np.broadcast_to(np.array(always, np.int64), (blocks, len(always))), near], axis=1)


def _listed(table: _Integers, heads: int, blocks: int, first_global: int) -> _Integers:
    """[1 or heads, blocks, listed], -1 where nothing is."""
    import numpy as np

    check_table(table.shape, heads)
    listed = np.full((table.shape[0], blocks, table.shape[2]), -1, np.int64)
    rows = min(table.shape[1], max(blocks - first_global, 0))
    listed[:, first_global : first_global + rows] = table[:, :rows]
    return listed


def _keys(seen: _Integers, sizes: _Integers) -> _Integers:
    """[heads, blocks], the keys in the blocks that are seen, each block once."""
    import numpy as np

    ordered = np.sort(seen, axis=2)
    counts = (ordered >= 0) & (ordered < len(sizes))
    counts[..., 1:] &= ordered[..., 1:] != ordered[..., :-1]
    return np.where(counts, sizes[np.clip(ordered, 0, len(sizes) - 1)], 0).sum(axis=2)


def check_table(shape: Sequence[int], heads: int) -> None:
    """Raise a ValueError for a table whose shape does not fit the heads."""
    if len(shape) != 3 or shape[0] not in (1, heads):
        raise ValueError(f"listed_blocks is {list(shape)}; with {heads} heads it is [1 or {heads}, rows, listed].")


OPERATOR = Operator(
    name="BlockSparseAttention",
    version=2,
    package=__package__,
    inputs=("query", "key", "value", "token_mask", "listed_blocks"),
    optional_inputs=("listed_blocks",),
    attributes={
        "block_size": Range(1),
        "first_global": Range(0),
        "last_global": Range(0),
        "window": Range(-1),
        "first_repeats": Range(0),
        "dense_tokens": Range(0),
        "ends_by_row": None,
        "scale": None,
    },
    pairs=pairs,
)
