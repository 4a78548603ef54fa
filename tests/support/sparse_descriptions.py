"""All sparse operators: a test of all of them goes through `DESCRIPTIONS`.

A new one is a module with a `SparseLayer` and a `Description`, and a line here.
"""

from __future__ import annotations

from support.block_operator import BLOCKS
from support.chunk_operator import CHUNKS
from support.lsh_operator import LSH
from support.sparse_operators import WINDOWS

DESCRIPTIONS = {
    "BlockSparseAttention": BLOCKS,
    "ChunkAttention": CHUNKS,
    "LSHAttention": LSH,
    "SlidingWindowAttention": WINDOWS,
}
