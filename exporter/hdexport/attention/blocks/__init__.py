"""Block-sparse attention: BigBird's, ETC's, or by a list of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Literal

from hdexport.attention.attention_type import DENSE_BASELINE, AttentionRecord
from hdruntime.bundle.checked_json import Count, Length, TokenCount
from hdruntime.bundle.manifest import Manifest

LISTED_BLOCKS_FILE = "listed_blocks.npy"
"""File of a bundle with the operator's table of each layer."""

GLOBAL_EMBEDDINGS_FILE = "global_embeddings.npy"
"""File of a bundle with the layers' inputs for ETC's global tokens."""


_REFERENCE_COPIES = 6
"""Copies of one head's scores in the definition of block-sparse attention."""


class Pattern(StrEnum):
    """The blocks that a block of queries sees."""

    BIGBIRD = "bigbird"
    """The first and the last block, a window of three blocks, and random ones."""
    ETC = "etc"
    """Global tokens in front of the text, and the window."""
    BLOCKS = "blocks"
    """The blocks that a list says."""


class Mode(StrEnum):
    """The source of the blocks that the pattern leaves open."""

    HF_EVAL = "hf_eval"
    """Every random block is block 0, as Hugging Face has it outside of training."""
    TABLE = "table"
    """A table of random blocks."""
    LISTS = "lists"
    """The list of the pattern ``blocks``."""
    NONE = "none"


class LastBlock(StrEnum):
    """The end of the last block."""

    PADDED = "padded"
    """The end of the padded batch, as in Hugging Face, so that a text's answer depends on the padding."""
    ROW = "row"
    """The end of each text: padding changes nothing."""


@dataclass(frozen=True, kw_only=True)
class BlockSparse(AttentionRecord):
    """Block-sparse attention: a checkpoint's own, or the replacement by ``--attention bigbird|etc|blocks``.

    Attributes:
        pattern: which blocks see which.
        block_size: tokens of a block.
        mode: where blocks beyond the pattern's come from.
        random_blocks: random blocks of each row of blocks; 0 for other patterns than ``bigbird``.
        global_tokens: tokens in front of each text that ``etc`` adds; 0 for other patterns.
        last_block: where the last block ends.
        dense_tokens: the longest text that is attended to densely; 0 for none. With ``padded`` its padding counts.
        converted: whether it took the place of dense attention.
    """

    holds_scores: ClassVar = False
    type: Literal["blocks"] = "blocks"
    pattern: Pattern
    block_size: Length
    mode: Mode
    random_blocks: Count
    global_tokens: TokenCount
    last_block: LastBlock
    dense_tokens: TokenCount
    converted: bool = False

    def keys_of_layers(self, manifest: Manifest, tokens: int) -> list[int]:
        """Five blocks and the random ones of each query; two blocks of queries meet all, which is two more of each."""
        layers = sum(count for name, count in manifest.operators.items() if "BlockSparseAttention" in name)
        keys = (7 + self.random_blocks) * self.block_size + self.global_tokens
        return [min(tokens, keys)] * layers

    def reference_copies(self, heads: int, *, has_sdpa: bool) -> int:
        """The definition holds all pairs of a head."""
        return _REFERENCE_COPIES if not self.converted and self.mode is Mode.TABLE else 0

    @property
    def baseline_note(self) -> str | None:
        """PyTorch's model is dense where blocks took that place, and has no tables."""
        if self.converted:
            return DENSE_BASELINE.format("block-sparse attention")
        is_as_trained = self.mode is Mode.HF_EVAL
        return (
            None if is_as_trained else "does not use the table of random blocks: all of its random blocks are block 0"
        )

    def export_note(self, tokens: int) -> str | None:
        """BigBird's code in PyTorch chooses dense attention for short texts, and an exporter traces its choice."""
        if tokens > self.dense_tokens:
            return None
        return f"attends densely at every length, as the model does up to {self.dense_tokens} tokens"


@dataclass(frozen=True, kw_only=True)
class BlockRequest:
    """Block-sparse attention as requested; None where nothing was given.

    Attributes:
        pattern: the attention in place of dense attention, or ``bigbird`` for BigBird's; None where only
            options were given.
        block_size: tokens of a block.
        random_blocks: number of random blocks in each row of blocks, for ``bigbird``.
        mode: ``hf_eval`` or ``table``, for ``bigbird``.
        seed: seed of the random tables: layer l draws with seed + l.
        file: path of the tables (``bigbird``) or of the lists of blocks (``blocks``).
        global_tokens: number of global tokens in front of each text, for ``etc``.
        global_ids: ids whose embeddings the global tokens get, one for all or one each; () for the model's first
            special token.
        last_block: policy of the last block, for ``bigbird``; None for ``padded``.
        global_embeddings: a .npy file for ``etc``; None computes them from ids.
    """

    pattern: Pattern | None = None
    block_size: int | None = None
    random_blocks: int | None = None
    mode: Mode | None = None
    seed: int | None = None
    file: Path | None = None
    global_tokens: int = 0
    global_ids: tuple[int, ...] = ()
    last_block: LastBlock | None = None
    global_embeddings: Path | None = None
