"""The work of block-sparse attention: queries with the keys of the blocks that they see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_Integers = npt.NDArray[np.int64]


def pairs(decisive: Mapping[str, Any], *, tokens: int, heads: int) -> int:
    """Queries and keys that see each other in one text without padding, in all its heads; each pair counts once.

    Exact, and linear in tokens to compute. A key that counts several times is one pair.

    Args:
        decisive: the attributes of a node, and ``listed_blocks``, the node's table if it has one: [1 or heads, rows,
            listed].
        tokens: of the text.
        heads: of the attention.

    Raises:
        ValueError: the table does not fit the heads.
    """
    if tokens <= decisive["dense_tokens"]:
        return heads * tokens * tokens
    block_size, first_global, last_global = (decisive[name] for name in ("block_size", "first_global", "last_global"))
    blocks = -(-tokens // block_size)
    sizes = np.full(blocks, block_size, np.int64)
    sizes[-1] = tokens - block_size * (blocks - 1)
    seen = _seen_by_rule(blocks, first_global, last_global, decisive["window"], decisive["first_repeats"])[None]
    if decisive.get("listed_blocks") is not None:
        listed = _listed(np.asarray(decisive["listed_blocks"], np.int64), heads, blocks, first_global)
        seen = np.concatenate([np.repeat(seen, len(listed), axis=0), listed], axis=2)
    keys = _keys(seen, sizes)  # [1 or heads, blocks]
    is_global = np.arange(blocks) < first_global
    is_global[-1] |= bool(last_global)
    keys[:, is_global] = tokens
    return int((keys * sizes).sum()) * (heads // len(keys))


def _seen_by_rule(blocks: int, first_global: int, last_global: int, window: int, first_repeats: int) -> _Integers:
    """[blocks, seen], what each block of queries sees without the table; there may be repeats, and blocks out of it."""
    number = np.arange(blocks, dtype=np.int64)[:, None]
    always = [*range(max(first_global, min(first_repeats, 1))), *([blocks - 1] if last_global else [])]
    near = number + np.arange(-window, window + 1)
    return np.concatenate([np.broadcast_to(np.array(always, np.int64), (blocks, len(always))), near], axis=1)


def _listed(table: _Integers, heads: int, blocks: int, first_global: int) -> _Integers:
    """[1 or heads, blocks, listed], -1 where nothing is."""
    if table.ndim != 3 or table.shape[0] not in (1, heads):
        raise ValueError(
            f"listed_blocks is {list(table.shape)}; with {heads} heads it is [1 or {heads}, rows, listed]."
        )
    listed = np.full((table.shape[0], blocks, table.shape[2]), -1, np.int64)
    rows = min(table.shape[1], max(blocks - first_global, 0))
    listed[:, first_global : first_global + rows] = table[:, :rows]
    return listed


def _keys(seen: _Integers, sizes: _Integers) -> _Integers:
    """[heads, blocks], the keys in the blocks that are seen, each block once."""
    ordered = np.sort(seen, axis=2)
    counts = (ordered >= 0) & (ordered < len(sizes))
    counts[..., 1:] &= ordered[..., 1:] != ordered[..., :-1]
    return np.where(counts, sizes[np.clip(ordered, 0, len(sizes) - 1)], 0).sum(axis=2)
