"""Block-sparse attention: blocks of queries see the blocks around them, global blocks, and blocks that a table lists.

It is BigBird's attention, with random blocks that are all block 0, as Hugging Face evaluates it, or listed in a table;
ETC's, whose global tokens are the first blocks of the text; and that of any other list of blocks. What each attribute
means stands in `reference`.
"""

from __future__ import annotations

from hdplugins.attention.operator import Operator

OPERATOR = Operator(
    name="BlockSparseAttention",
    version=1,
    package=__package__,
    inputs=("query", "key", "value", "token_mask", "listed_blocks"),
    optional_inputs=("listed_blocks",),
    attributes=(
        "block_size",
        "first_global",
        "last_global",
        "window",
        "first_repeats",
        "dense_tokens",
        "ends_by_row",
        "scale",
    ),
    # In float32, blocks took 0.84 and 0.92 of ONNX Runtime's CPU time at 4096 and 8192 tokens on an AMD EPYC, 1.05 and
    # 0.99 on an Intel Xeon, and twice the memory.
    faster_in_openvino=("bfloat16",),
)
