"""LSH and chunk attention in PyTorch: the nodes of a traced model, the mask that converted layers share, the reference.

The reference that bundles are compared with is the attention of transformers' Reformer. It runs in float64: in float32
its -1e5 for a token's own key leaves two decimals of a weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, ReformerConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from hdexport.attention.lsh import Chunks, LshAttention
from hdexport.attention.lsh.discrete_outputs import LshDiscreteOutputs
from hdexport.attention.model_parts import give_masks, operator_node, run_text, use_attention
from hdplugins.attention.chunks.operator import padded_tokens
from hdplugins.attention.chunks.reference import neighbours
from hdplugins.attention.lsh.reference import hash_tokens
from hdruntime.bundle.manifest import Dtype


def lsh_node(
    query_key: torch.Tensor,
    value: torch.Tensor,
    token_mask: torch.Tensor,
    rotations: torch.Tensor,
    *,
    record: LshAttention,
    scale: float,
) -> torch.Tensor:
    """One ``LSHAttention`` node; see `operator_node`.

    Args:
        query_key, value: [batch, tokens, heads, head_dim]; the result has the same shape and dtype.
        token_mask: [batch, tokens], int32, 0 for padding, 1 for real tokens.
        rotations: [heads, head_dim, rounds, directions], float32.
    """
    assert record.hashed is not None
    assert record.hashes is not None
    attributes = _attributes(record, record.hashed, scale) | {
        "buckets": record.hashes.buckets,
        "rounds": record.hashes.rounds,
        "ends_by_row": int(record.converted),
    }
    return operator_node("LSHAttention", (query_key, value, token_mask, rotations), attributes)


def chunk_node(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    token_mask: torch.Tensor,
    *,
    record: LshAttention,
    scale: float,
) -> torch.Tensor:
    """One ``ChunkAttention`` node; see `lsh_node`."""
    assert record.local is not None
    attributes = _attributes(record, record.local, scale)
    return operator_node("ChunkAttention", (query, key, value, token_mask), attributes)


@dataclass(frozen=True)
class LshMask:
    """The mask of layers whose dense attention became LSH attention.

    Attributes:
        token_mask: [batch, tokens], int32, 0 for padding, 1 for real tokens.
        rotations: [heads, head_dim, rounds, directions], float32.
    """

    record: LshAttention
    token_mask: torch.Tensor
    rotations: torch.Tensor

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[batch, tokens, heads, head_dim], of queries that are keys as well; see `LayerMask`."""
        attended = lsh_node(query, value, self.token_mask, self.rotations, record=self.record, scale=scale)
        return attended.contiguous()


def _attributes(record: LshAttention, chunks: Chunks, scale: float) -> dict[str, Any]:
    return {
        "chunk": chunks.tokens,
        "before": chunks.before,
        "after": chunks.after,
        "multiple": record.multiple,
        "causal": int(record.causal),
        "scale": float(scale),
    }


_IMPLEMENTATION = "hdexport-lsh-reference"
"""Name under which transformers' attention interface knows the reference."""


def use_own_hashes(
    model: PreTrainedModel, record: LshAttention, rotations: torch.Tensor, dtype: Dtype
) -> LshDiscreteOutputs:
    """Make transformers' Reformer hash as a bundle does, in place; it follows the buckets of a graph, which are
    returned.

    `rotations` are [heads, head_dim, rounds, directions], float32; `dtype` is the bundle's.
    """
    hashes = LshDiscreteOutputs(record, rotations, dtype)
    modules = [module for module in model.modules() if isinstance(module, LSHSelfAttention)]
    for layer, module in enumerate(modules):
        hashes.use(module)
        module.double()
        module.register_forward_pre_hook(functools.partial(_before, hashes, layer), with_kwargs=True)
        module.register_forward_hook(_to_float)
    return hashes


def _before(
    hashes: LshDiscreteOutputs, layer: int, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    hashes.begin_layer(layer)
    return args, kwargs | {"hidden_states": kwargs["hidden_states"].double()}


def _to_float(_: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return output._replace(hidden_states=output.hidden_states.float())


def use_hashes(
    model: PreTrainedModel, record: LshAttention, rotations: torch.Tensor, dtype: Dtype
) -> LshDiscreteOutputs:
    """Replace a model's dense attention, in place, by transformers' Reformer attention; see `use_own_hashes`."""
    hashes = LshDiscreteOutputs(record, rotations, dtype)
    attention = _library_attention(record, *rotations.shape[:2])
    hashes.use(attention)
    use_attention(model, _IMPLEMENTATION, _attend)
    give_masks(model, lambda mask: _Texts(attention, hashes, record.multiple, mask))
    return hashes


@dataclass(frozen=True)
class _Texts:
    """The layers' mask: transformers' attention, and which tokens of each text are real.

    Attributes:
        attention: the attention module of a Reformer; its hidden states are queries and values side by side.
        hashes: the hashes that the attention follows.
        multiple: tokens of which the length of a text of more than one chunk is a multiple.
        mask: [batch, tokens], nonzero for real tokens.
    """

    attention: LSHSelfAttention
    hashes: LshDiscreteOutputs
    multiple: int
    mask: torch.Tensor


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: _Texts,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function: each text alone, without its padding; padding has 0.

    Args:
        query, key, value: [batch, heads, tokens, head_dim]; keys are not looked at. The result is [batch, tokens,
            heads, head_dim].
        scaling: factor of the scores; None for head_dim ** -0.5.
    """
    head_dim = query.shape[-1]
    # Transformers' factor is fixed. Hashes and keys do not depend on the length of a vector.
    factor = 1.0 if scaling is None else scaling * math.sqrt(head_dim)
    states = torch.cat([(query * factor).transpose(1, 2).flatten(2), value.transpose(1, 2).flatten(2)], dim=-1).double()
    attended = torch.zeros_like(query).transpose(1, 2).flatten(2)
    for row, real in enumerate(attention_mask.mask.bool()):
        attention_mask.hashes.begin_layer(tokens=real)
        text = states[row, real]
        tokens, multiple = len(text), attention_mask.multiple
        if tokens:
            padding = -tokens % multiple if tokens > multiple else 0
            padded = torch.nn.functional.pad(text, (0, 0, 0, padding))[None]
            mask = (torch.arange(tokens + padding) < tokens).long()[None]
            outputs = attention_mask.attention(hidden_states=padded, attention_mask=mask).hidden_states
            attended[row, real] = outputs[0, :tokens].to(attended.dtype)
    return attended.unflatten(2, (-1, head_dim)), None


def _library_attention(record: LshAttention, heads: int, head_dim: int) -> LSHSelfAttention:
    assert record.hashed is not None
    config = ReformerConfig(
        attn_layers=["lsh"],
        num_attention_heads=heads,
        attention_head_size=head_dim,
        hidden_size=2 * heads * head_dim,
        axial_pos_embds_dim=[heads * head_dim, heads * head_dim],
        lsh_attn_chunk_length=record.hashed.tokens,
        lsh_num_chunks_before=record.hashed.before,
        lsh_num_chunks_after=record.hashed.after,
    )
    attention = LSHSelfAttention(config, layer_idx=0).double().eval()
    width = heads * head_dim
    attention.query_key, attention.value = _Columns(0, width), _Columns(width, 2 * width)
    return attention


class _Columns(torch.nn.Module):
    """A projection that picks columns."""

    def __init__(self, first: int, end: int) -> None:
        super().__init__()
        self._columns = slice(first, end)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states[..., self._columns]


_TOP = 16
"""Keys of each query that matter."""


def recall(
    model: PreTrainedModel, record: LshAttention, rotations: torch.Tensor, input_ids: torch.Tensor
) -> Iterator[str]:
    """A line on the keys with the largest scores that hashes find, over all layers, heads and queries of a text.

    The attention of the model is transformers' Reformer's; `rotations` are [heads, head_dim, rounds, directions],
    float32, and `input_ids` [1, tokens].
    """
    shares_of_layers: list[torch.Tensor] = []
    top = min(_TOP, input_ids.shape[1] - 1)
    if top < 1:
        return
    name = model.config._attn_implementation
    attend = ALL_ATTENTION_FUNCTIONS[name]

    def watch(module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shares_of_layers.append(_share(query, rotations, record, top))
        return attend(module, query, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(name, watch)
    try:
        run_text(model, input_ids)
    finally:
        ALL_ATTENTION_FUNCTIONS.register(name, attend)
    shares = torch.stack(shares_of_layers)
    yield (
        f"LSH attention sees {shares.mean():.0%} of the {top} keys with the largest scores of each query; by layer "
        f"{shares.min():.0%} to {shares.max():.0%}"
    )


def _share(query: torch.Tensor, rotations: torch.Tensor, record: LshAttention, top: int) -> torch.Tensor:
    """Share, [], of its `top` nearest keys that a query of [1, heads, tokens, head_dim] sees."""
    keys = torch.nn.functional.normalize(query[0], dim=-1)
    scores = query[0] @ keys.mT  # [heads, tokens, tokens]
    scores.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
    largest = scores.topk(top, dim=-1).indices
    return _seen(query, rotations, record).gather(2, largest).float().mean()


def _seen(query: torch.Tensor, rotations: torch.Tensor, record: LshAttention) -> torch.Tensor:
    """[heads, tokens, tokens], bool, which keys a query sees in any round."""
    hashes, chunks = record.hashes, record.hashed
    assert hashes is not None
    assert chunks is not None
    heads, tokens = query.shape[1:3]
    padded = padded_tokens(tokens, record.multiple)
    buckets = hash_tokens(query.transpose(1, 2), rotations, hashes.buckets)[0]  # [heads, rounds, tokens]
    buckets = torch.nn.functional.pad(buckets, (0, padded - tokens), value=int(buckets.max()) + 1)
    sorted_tokens = buckets.argsort(stable=True, dim=-1).flatten(1).unflatten(1, (-1, chunks.tokens))
    table = neighbours(sorted_tokens.shape[1], chunks.before, chunks.after)
    seen = torch.zeros(heads, padded, padded, dtype=torch.bool)
    for head, of_head in enumerate(sorted_tokens):
        seen[head, of_head[:, :, None], of_head[table].flatten(1)[:, None, :]] = True
    return seen[:, :tokens, :tokens]
