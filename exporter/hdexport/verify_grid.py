"""The grid of a verification: which lengths, batches and paddings a bundle is asked about."""

from __future__ import annotations

__all__ = ["LONGEST_CHECKED", "Case", "cases", "grid_lengths"]

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hdruntime.manifest import BlockSparse

LONGEST_CHECKED = 8192
"""Tokens of the longest input that is checked unless asked: PyTorch needs minutes for more."""

_SHORT_TOKENS = 512
"""Half of the longest text that takes PyTorch no time to speak of; checkpoints that windows come with serve 4096 tokens
and more."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One input: the real tokens of each row, and where the padding up to `tokens` is.

    Attributes:
        tokens: padded length of the batch.
        lengths: real tokens of each row.
        padding: ``none``, ``right`` or ``left``.
    """

    tokens: int
    lengths: tuple[int, ...]
    padding: str

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def real(self, length: int) -> slice:
        """Where the real tokens of a row of that length are."""
        return slice(self.tokens - length, None) if self.padding == "left" else slice(0, length)


def grid_lengths(
    base: int,
    max_len: int,
    *,
    windows: Sequence[int] = (),
    blocks: BlockSparse | None = None,
    longest: int = LONGEST_CHECKED,
) -> list[int]:
    """The lengths to check: around the smallest, a block's, the windows' and the checkpoint's limits, and the longest.

    Args:
        base: positions of the checkpoint, n: the grid holds n - 1, n, n + 1 and 2 n.
        max_len: the bundle's longest input.
        windows: tokens on each side of each windowed layer, w: the grid holds w, w + 1, w + 2 and 2 w + 1.
        blocks: block-sparse attention: the grid holds the lengths around a block and around the longest text that is
            attended to densely, and the first that fills another block.
        longest: lengths above it are left out.
    """
    wanted = {1, 2, 63, 64, 65, base - 1, base, base + 1, 2 * base, max_len}
    if blocks is not None:
        for tokens in (blocks.block_size, blocks.dense_tokens):
            wanted |= {tokens - 1, tokens, tokens + 1}
        wanted.add(max(blocks.dense_tokens, 4 * blocks.block_size) + blocks.block_size)
    for window in set(windows):
        wanted |= {window, window + 1, window + 2, 2 * window + 1}
    return sorted(length for length in wanted if 1 <= length <= min(max_len, longest))


def cases(
    base: int,
    max_len: int,
    *,
    windows: Sequence[int] = (),
    blocks: BlockSparse | None = None,
    longest: int = LONGEST_CHECKED,
    thorough: bool,
) -> Iterator[Case]:
    """The grid.

    Args:
        base: positions of the checkpoint.
        max_len: the bundle's longest input.
        windows: tokens on each side of each windowed layer.
        blocks: block-sparse attention, None where there is none.
        longest: lengths above it are left out.
        thorough: at long lengths, above 2 x base or 1024, too, fill every row of an unpadded batch and pad on the
            left. Without it only one row is that long, the others are short and padded: PyTorch takes seconds for each
            long row.
    """
    short = min(base, _SHORT_TOKENS)
    for tokens in grid_lengths(base, max_len, windows=windows, blocks=blocks, longest=longest):
        is_long = tokens > 2 * short
        part = min(short, -(-3 * tokens // 4)) if is_long else -(-3 * tokens // 4)
        yield Case(tokens=tokens, lengths=(tokens,), padding="none")
        if not is_long or thorough:
            yield Case(tokens=tokens, lengths=(tokens,) * 3, padding="none")
        if part < tokens:
            yield Case(tokens=tokens, lengths=(part,), padding="right")
            yield Case(tokens=tokens, lengths=(tokens, part, 1), padding="right")
            if not is_long or thorough:
                yield Case(tokens=tokens, lengths=(part, tokens, 1), padding="left")
