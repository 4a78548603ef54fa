"""Block-sparse attention, as a kind: a model's own, or in place of dense attention."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hdexport.attention.attention_type import (
    AttentionConversion,
    AttentionType,
    Boundaries,
    CliSyntax,
    ConversionContext,
    ReferenceProperties,
)
from hdexport.attention.blocks import BlockRequest, BlockSparse, LastBlock, Mode, Pattern
from hdexport.attention.blocks.lower import LOWERING
from hdexport.attention.spec import InvalidSpecError, SpecReader
from hdexport.model.family import Family
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError, Setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    # With NumPy, which a command's help does without.
    from hdexport.attention.blocks.conversion import BlockConversion

_SYNTAXES = {
    "bigbird": CliSyntax(
        grammar="bigbird[:block=B,random=R,mode=hf_eval|table,seed=S,table=FILE.npy]",
        example="bigbird:block=64,random=3",
        summary="BigBird's blocks",
        help="BigBird, by blocks of B tokens (default: 64): the first and the last block, three around a query's, and "
        "R random ones (default: 3), which in hf_eval are all the first, as in Hugging Face; else they are drawn by "
        "seed or read from the table. A BigBird checkpoint takes mode, seed and table",
    ),
    "etc": CliSyntax(
        grammar="etc:global=G[,block=B,tokens=ID[/ID...]]",
        example="etc:global=64,block=64",
        summary="ETC's blocks and global tokens",
        help="G global tokens in front of each text, with the embeddings of these ids "
        "(default: the token that texts begin with), and three blocks around a query's",
    ),
    "blocks": CliSyntax(
        grammar="blocks:file=FILE.npz,block=B",
        example="blocks:file=pattern.npz,block=64",
        summary="the blocks of a file",
        help="the blocks that a file lists, full_kv_num_blocks and full_kv_indices as in FlexAttention",
    ),
}

_NAMES = {
    "bigbird": ("block", "random", "mode", "seed", "table"),
    "etc": ("global", "block", "tokens"),
    "blocks": ("file", "block"),
}

_MODES_OF_PATTERN = {
    Pattern.BIGBIRD: (Mode.HF_EVAL, Mode.TABLE),
    Pattern.ETC: (Mode.NONE,),
    Pattern.BLOCKS: (Mode.LISTS,),
}


class BlocksAttentionType(AttentionType):
    """Blocks of queries that see blocks of keys."""

    name = "blocks"
    rank = 2
    syntaxes = MappingProxyType(_SYNTAXES)
    record_type = BlockSparse
    lowerings = (LOWERING,)
    scales_queries = True

    def add_arguments(self, group: argparse._ArgumentGroup) -> None:
        group.add_argument(
            "--bigbird-last-block",
            metavar="POLICY",
            choices=[policy.value for policy in LastBlock],
            help="padded (default): BigBird's last block is that of the padded batch, as in Hugging Face; row: that of "
            "each text, so that padding changes no answer",
        )
        group.add_argument(
            "--global-embeddings",
            metavar="FILE.npy",
            help="embeddings of etc's global tokens, float32 [G, width], instead of those of ids",
        )

    def request(self, spec: str | None, options: Mapping[str, Any]) -> BlockRequest | None:
        requested = BlockRequest() if spec is None else _request(spec)
        policy, file = options.get("bigbird_last_block"), options.get("global_embeddings")
        requested = dataclasses.replace(
            requested,
            last_block=None if policy is None else LastBlock(policy),
            global_embeddings=None if file is None else Path(file),
        )
        return None if requested == BlockRequest() else requested

    def conversion(self, request: BlockRequest | None, context: ConversionContext) -> BlockConversion | None:
        """A BigBird's own, or blocks in place of dense attention, with their tables and embeddings."""
        from hdexport.attention.blocks.conversion import block_conversion

        return block_conversion(request, context)

    def problems(self, record: BlockSparse, manifest: Manifest) -> Iterator[str]:
        """Each pattern has modes of its own."""
        modes = _MODES_OF_PATTERN[record.pattern]
        if record.mode not in modes:
            known = " or ".join(mode.value for mode in modes)
            yield f".mode should be {known} for {record.pattern.value}, not {record.mode.value}"

    def read(self, record: BlockSparse, bundle: Bundle) -> BlockConversion:
        """The conversion, with the tables and embeddings that are files of the bundle."""
        from hdexport.attention.blocks.conversion import read_conversion

        return read_conversion(record, bundle)

    def use_reference(
        self, conversion: AttentionConversion, model: PreTrainedModel, family: Family
    ) -> ReferenceProperties:
        """Counts of pairs for blocks that the model was not trained with; for tables, the operator's definition."""
        from hdexport.attention.blocks.conversion import BlockConversion

        assert isinstance(conversion, BlockConversion)
        if not conversion.is_native:
            from hdexport.attention.blocks.model import use_block_masks

            use_block_masks(
                model,
                conversion.record,
                ordinary_keys=conversion.ordinary_keys,
                tables=conversion.tables,
                global_embeddings=conversion.global_embeddings,
            )
        elif conversion.listed_blocks is not None:
            # Hugging Face has tables in training only: the operator's definition in PyTorch, which tests hold to that.
            conversion.adapt(model, family)
        else:
            return ReferenceProperties(undefined_padding=True, counts_from_padding=True)
        return ReferenceProperties(replaced=True, undefined_padding=True)

    def boundaries(self, record: BlockSparse) -> Boundaries:
        """Around a block, the first text that is not attended to densely, and a last block of a single token."""
        block, dense = record.block_size, record.dense_tokens
        another = max(dense, 4 * block) + block
        lengths = {tokens + step for tokens in (block, dense) for step in (-1, 0, 1)} | {another}
        return Boundaries(lengths=frozenset(lengths), first=max(dense, block) + 1, second=another + 1, alone=True)

    def describe(self, record: BlockSparse) -> Iterator[tuple[str, str]]:
        yield "block-sparse", f"{record.pattern.value}, blocks of {record.block_size} tokens"
        if record.pattern is Pattern.BIGBIRD:
            of_mode = {Mode.HF_EVAL: "all of them block 0, as in Hugging Face", Mode.TABLE: "from a table"}
            yield "", f"{record.random_blocks} random blocks, {of_mode[record.mode]}"
            of_policy = {
                LastBlock.PADDED: "that of the padded batch, as in Hugging Face: padding changes answers",
                LastBlock.ROW: "each text's own: padding changes nothing",
            }
            yield "", f"the last block is {of_policy[record.last_block]}"
        if record.global_tokens:
            yield "", f"{record.global_tokens} global tokens in front of each text"
        if record.dense_tokens:
            yield "", f"dense up to {record.dense_tokens} tokens"


ATTENTION_TYPE = BlocksAttentionType()


def _request(spec: str) -> BlockRequest:
    word, colon, parts = spec.partition(":")
    is_bare = word == "bigbird" and not colon
    reader = SpecReader(spec, None if is_bare else parts, names=_NAMES[word], sign="=", example=_SYNTAXES[word].example)
    return {"bigbird": _bigbird, "etc": _etc, "blocks": _blocks}[word](reader)


def _bigbird(reader: SpecReader) -> BlockRequest:
    values = reader.values
    name = values.get("mode", "table" if "table" in values or "seed" in values else None)
    mode = next((known for known in _MODES_OF_PATTERN[Pattern.BIGBIRD] if known == name), None)
    if mode is None and name is not None:
        raise InvalidSpecError(f"mode={name}")
    if mode is Mode.HF_EVAL and ("table" in values or "seed" in values):
        raise InputError(
            Setting("attention", reader.spec),
            " has a table of random blocks, which mode=hf_eval does not use.",
            hint="Leave out mode, or set mode=table.",
        )
    if "table" in values and "seed" in values:
        raise InputError(
            Setting("attention", reader.spec),
            " has a table, and a seed to draw one with.",
            hint="Leave one of them out.",
        )
    return BlockRequest(
        pattern=Pattern.BIGBIRD,
        block_size=reader.optional("block", minimum=1),
        random_blocks=reader.optional("random", minimum=0),
        mode=mode,
        seed=reader.optional("seed", minimum=0, maximum=2**31 - 1),
        file=Path(values["table"]) if "table" in values else None,
    )


def _etc(reader: SpecReader) -> BlockRequest:
    tokens = reader.number("global", reader.required("global"), minimum=1)
    listed = reader.values.get("tokens")
    ids = () if listed is None else tuple(reader.number("tokens", text, minimum=0) for text in listed.split("/"))
    if len(ids) not in (0, 1, tokens):
        raise InputError(
            Setting("attention", reader.spec),
            f" has {len(ids)} ids for {tokens} global tokens.",
            hint=f"Use one id for all, tokens={ids[0]}, or {tokens} ids, separated by slashes.",
        )
    block_size = reader.optional("block", minimum=1)
    return BlockRequest(pattern=Pattern.ETC, block_size=block_size, global_tokens=tokens, global_ids=ids)


def _blocks(reader: SpecReader) -> BlockRequest:
    file, block_size = reader.required("file"), reader.number("block", reader.required("block"), minimum=1)
    return BlockRequest(pattern=Pattern.BLOCKS, block_size=block_size, file=Path(file))
