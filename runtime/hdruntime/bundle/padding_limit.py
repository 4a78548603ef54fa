"""How far rows may be padded before their answers change: without end, but for one kind of block-sparse attention."""

from __future__ import annotations

__all__ = ["changes_with_padding", "padding_limit"]

import sys

from hdruntime.bundle.manifest import BlockSparse


def changes_with_padding(block_sparse: BlockSparse | None) -> bool:
    """Whether answers depend on the length that a batch is padded to, as Hugging Face's BigBird has it.

    Args:
        block_sparse: the bundle's.
    """
    return block_sparse is not None and block_sparse.last_block == "padded"


def padding_limit(block_sparse: BlockSparse | None, tokens: int) -> int:
    """The most tokens that a row may be padded to with its answer as it was; ``sys.maxsize`` where there is no limit.

    Lengths of one limit may share a batch. Where there is one, it is the end of the row's last block, which stays the
    last; of a row that is attended to densely it is the end of those: there the last block is as any other.

    Args:
        block_sparse: the bundle's.
        tokens: of the row, 1 or more, padding that is part of the question included.
    """
    if block_sparse is None or not changes_with_padding(block_sparse):
        return sys.maxsize
    blocks = -(-tokens // block_sparse.block_size)
    return max(blocks * block_sparse.block_size, block_sparse.dense_tokens)
