"""BigBird: blocks of tokens see the blocks around them, the first, the last, and random ones, which may count again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from hdexport.attention.blocks import BlockSparse
from hdexport.attention.blocks.conversion import BlockConversion, bigbird
from hdexport.attention.blocks.model import LISTED_BLOCKS, BlockMask, through_blocks
from hdexport.attention.dense.model import DenseMask
from hdexport.attention.interface import LayerMask
from hdexport.families import rembert
from hdexport.model.family import Family, NativeAttention, UnsupportedReason
from hdruntime.errors import ModelError


class BigBirdAttention(rembert.RemBertAttention):
    """The projections of one of transformers' two attentions of a BigBird, or BigBird-Pegasus', around
    our operators.

    `listed_blocks`, int32, [1 or heads, rows, listed], is the layer's table for the mode ``table``; None for none.
    """

    def __init__(self, original: Any, listed_blocks: torch.Tensor | None) -> None:
        super().__init__(original)
        # Not a constant: each layer has its own, and layers that differ in nothing else are traced once.
        self.register_buffer(LISTED_BLOCKS, listed_blocks)


def block_sparse(config: Any) -> BlockSparse | None:
    """The attention of a BigBird, or a BigBird-Pegasus, as Hugging Face evaluates it; None where it is dense.

    A ModelError says that transformers cannot evaluate it.
    """
    if config.attention_type == "original_full":
        return None
    spec = bigbird(block_size=config.block_size, random_blocks=config.num_random_blocks)
    if spec.random_blocks < 1:
        raise ModelError(
            f"config.json has num_random_blocks {spec.random_blocks}, with which Hugging Face's code fails on texts of "
            f"more than {spec.dense_tokens} tokens.",
            hint="Set it to 1 or more, as the model was trained.",
        )
    return spec


def forget_short_texts(model: PreTrainedModel) -> None:
    """Make a model of transformers answer every call as a new one would, in place.

    A text that is short enough for dense attention makes it a dense model permanently; so does this, and its
    ``forward``, which sentence-transformers calls without the hooks of a module, turns it back first. Modules that are
    made on the way back follow the configuration, and with it the positions that there are now; modules made before
    do not.
    """
    if block_sparse(model.config) is None:
        return
    base: Any = model.base_model
    base.set_attention_type("original_full")
    forward = base.forward

    @functools.wraps(forward)
    def of_new_model(*arguments: Any, **inputs: Any) -> Any:
        base.set_attention_type("block_sparse")
        return forward(*arguments, **inputs)

    base.forward = of_new_model


def own_blocks(
    model: Any, conversion: BlockConversion | None
) -> tuple[BlockSparse | None, Sequence[torch.Tensor | None]]:
    """The attention, None where it is dense, and the table of each layer, if any."""
    layers = model.config.num_hidden_layers
    return (None, [None] * layers) if conversion is None else (conversion.record, conversion.tables(layers))


def run_layers(
    spec: BlockSparse | None,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    layers: Callable[[torch.Tensor, LayerMask], torch.Tensor],
) -> torch.Tensor:
    """`through_blocks`, or, where the attention is dense, the layers as they are."""
    if spec is None:
        return layers(hidden_states, DenseMask(attention_mask.bool()))

    def sparse(states: torch.Tensor, token_mask: torch.Tensor) -> torch.Tensor:
        return layers(states, BlockMask(spec, token_mask))

    return through_blocks(spec, hidden_states, attention_mask, sparse)


class _Attention(torch.nn.Module):
    """`BigBirdAttention` and its output layer, without the original's seed, in which all layers differ."""

    def __init__(self, original: Any, listed_blocks: torch.Tensor | None) -> None:
        super().__init__()
        self.self, self.output = BigBirdAttention(original.self, listed_blocks), original.output

    def forward(self, hidden_states: torch.Tensor, attention_mask: LayerMask, **_: Any) -> tuple[torch.Tensor, None]:
        """Attend; the arguments are named as the layer around names them."""
        attended, _ = self.self(hidden_states, attention_mask)
        return self.output(attended, hidden_states), None


def _forward(
    model: Any,
    spec: BlockSparse | None,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    token_type_ids: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **_: Any,
) -> BaseModelOutputWithPoolingAndCrossAttentions:
    """The model's forward without steps for Hugging Face's attention: padding to blocks, masks, a switch by length."""
    hidden_states = model.embeddings(input_ids=input_ids, position_ids=position_ids, token_type_ids=token_type_ids)

    def layers(states: torch.Tensor, mask: LayerMask) -> torch.Tensor:
        for layer in model.encoder.layer:
            states = layer(states, attention_mask=mask)
        return states

    hidden_states = run_layers(spec, hidden_states, attention_mask, layers)
    return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=hidden_states)


def _adapt(model: Any, conversion: BlockConversion | None = None) -> None:
    if hasattr(model, "qa_classifier") and model.config.sep_token_id is None:
        raise ModelError(
            "config.json has no sep_token_id, which a big_bird needs to exclude the question from the answers.",
            hint='Add it: the tokenizer knows the id of its separator, e.g. "sep_token_id": 66.',
        )
    base, (spec, tables) = model.base_model, own_blocks(model, conversion)
    for layer, table in zip(base.encoder.layer, tables, strict=True):
        layer.attention = _Attention(layer.attention, table)
    base.forward = functools.partial(_forward, base, spec)


def _padded_tokens(config: Any, tokens: int) -> int:
    return -(-tokens // config.block_size) * config.block_size


FAMILY = Family(
    padded_tokens=_padded_tokens,
    adapt=_adapt,
    native_attention=NativeAttention(attention_type="blocks", record=block_sparse, adapt=_adapt),
    # Its tokenizer makes no token types for question answering; its model makes them.
    counts_separators=True,
    as_trained=forget_short_texts,
    conversion_unsupported_reason=UnsupportedReason.NATIVE_SPARSE,
)
