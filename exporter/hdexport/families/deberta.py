"""DeBERTa, its second version and its third: scores of contents, and of contents with distances, in both directions.

Source: He et al., "DeBERTa: Decoding-enhanced BERT with Disentangled Attention" (2021).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from transformers import DebertaForSequenceClassification, DebertaV2ForSequenceClassification, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from hdexport.attention.dense.model import DenseMask
from hdexport.attention.disentangled.model import attend_disentangled
from hdexport.model.family import Family, UnsupportedReason
from hdruntime.errors import ModelError

_FARTHEST = 2**22
"""Tokens; a table of distances that is not at its end there is not one of distances."""


class _SelfAttention(torch.nn.Module):
    """The original's projections, of either version, around our operator, with tables of the projected rows of
    distances.

    `tables` are `position_keys` and `position_queries` of the operator. `row_of_distance` is one for all layers, so
    that a graph has it once.
    """

    row_of_distance: torch.Tensor

    def __init__(self, original: Any, tables: tuple[torch.Tensor, torch.Tensor], row_of_distance: torch.Tensor) -> None:
        super().__init__()
        self.query_proj, self.key_proj, self.value_proj = _projections(original)
        self.head_dim = int(original.attention_head_size)
        self.position_keys, self.position_queries = (torch.nn.Parameter(table) for table in tables)
        self.register_buffer("row_of_distance", row_of_distance, persistent=False)
        self.scale = (self.head_dim * _number_of_terms(original)) ** -0.5

    def forward(self, hidden_states: torch.Tensor, attention_mask: DenseMask, *_: Any, **__: Any) -> tuple[Any, None]:
        """[batch, tokens, width], and no weights."""
        query, key, value = (
            project(hidden_states).unflatten(2, (-1, self.head_dim))
            for project in (self.query_proj, self.key_proj, self.value_proj)
        )
        tables = self.position_keys, self.position_queries, self.row_of_distance
        return attend_disentangled(attention_mask, query, key, value, *tables, scale=self.scale).flatten(2), None


def _projections(attention: Any) -> list[torch.nn.Linear]:
    """Projections of queries, keys and values. The first version has a head's side by side, in one matrix."""
    if not hasattr(attention, "in_proj"):
        return [attention.query_proj, attention.key_proj, attention.value_proj]
    weights = attention.in_proj.weight.detach().unflatten(0, (attention.num_attention_heads, 3, -1))
    biases = attention.q_bias, torch.zeros_like(attention.q_bias), attention.v_bias
    return [_linear(weights[:, part].flatten(0, 1), bias) for part, bias in enumerate(biases)]


def _linear(weight: torch.Tensor, bias: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(1, 1)
    linear.weight = torch.nn.Parameter(weight.contiguous())
    linear.bias = torch.nn.Parameter(bias.detach().clone())
    return linear


def _number_of_terms(attention: Any) -> int:
    """How many terms a score has, by whose root it is divided; the second version counts the terms that it knows."""
    kinds: list[str] = attention.pos_att_type
    return 1 + (len(kinds) if hasattr(attention, "in_proj") else len({"c2p", "p2c"} & set(kinds)))


def _tables(attention: Any, embeddings: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of distances as keys and as queries: [heads, rows, head_dim] each, zeros for no such term.

    `embeddings` of the distances are [rows, width]; None for none.
    """
    heads, head_dim = attention.num_attention_heads, attention.attention_head_size
    if embeddings is None:
        return torch.zeros(heads, 1, head_dim), torch.zeros(heads, 1, head_dim)
    if hasattr(attention, "in_proj"):
        projections = {"c2p": getattr(attention, "pos_proj", None), "p2c": getattr(attention, "pos_q_proj", None)}
    elif attention.share_att_key:
        projections = {"c2p": attention.key_proj, "p2c": attention.query_proj}
    else:
        projections = {
            "c2p": getattr(attention, "pos_key_proj", None),
            "p2c": getattr(attention, "pos_query_proj", None),
        }
    tables = []
    for kind, projection in projections.items():
        if kind in attention.pos_att_type and projection is not None:
            table = projection(embeddings).detach().unflatten(1, (heads, head_dim)).transpose(0, 1)
        else:
            table = torch.zeros(heads, len(embeddings), head_dim)
        tables.append(table.contiguous())
    return tables[0], tables[1]


def rows_of_distances(*, buckets: int, most: int) -> torch.Tensor:
    """[2 * reach + 1], int64: the row of each distance of a key from a query, from -reach to the reach.

    Transformers' own code decides which bucket a distance is in: its logarithms are rounded. A ModelError says that the
    table has no row for the farthest distances of each direction.

    Args:
        buckets: number of buckets that the distances of a direction share; 0 or less where each has a row of its own.
        most: the distance that these buckets are for, or the number of such rows.
    """
    span, far = (buckets, most) if buckets > 0 else (most, most)
    while far <= _FARTHEST:
        back = torch.arange(far, -far - 1, -1)  # from the key to the query, as transformers counts
        counted = make_log_bucket_position(back, buckets, most).long() if buckets > 0 else back
        rows = (counted + span).clamp(0, 2 * span - 1)
        if bool((rows.diff() > 0).any()):
            break
        if rows[0] == 2 * span - 1 and rows[-1] == 0:
            extra = int(min((rows == rows[0]).sum(), (rows == 0).sum())) - 1
            return rows[extra : len(rows) - extra].clone()
        far *= 2
    raise ModelError(
        f"config.json has position_buckets {buckets} and max_relative_positions {most}, which do not tell distances "
        "apart: the second must be larger than half of the first.",
        hint="Set both to the model's, e.g. 256 and 512.",
    )


def _shared_rows(encoder: Any) -> torch.Tensor:
    if not encoder.relative_attention:
        return torch.zeros(3, dtype=torch.int64)
    return rows_of_distances(buckets=getattr(encoder, "position_buckets", -1), most=encoder.max_relative_positions)


def _plain_norms(model: torch.nn.Module) -> None:
    """Make the first version's normalisations PyTorch's, which graphs have an operator for, in place."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, DebertaLayerNorm):
                norm = torch.nn.LayerNorm(len(child.weight), eps=child.variance_epsilon)
                norm.weight, norm.bias = child.weight, child.bias
                setattr(parent, name, norm)


def _classify(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, **others: torch.Tensor) -> Any:
    """A classifier's forward, which reads the first real token, wherever padding is.

    The original reads the token at index 0. With padding on the left that is padding, not a token of the text.
    """
    states = model.deberta(input_ids, attention_mask=attention_mask, **others).last_hidden_state
    is_first = attention_mask * (attention_mask.cumsum(1) == 1)  # [batch, tokens]
    # A product would make NaN of a NaN in the padding.
    nothing = torch.zeros((), dtype=states.dtype, device=states.device)
    first = torch.where(is_first.unsqueeze(-1) == 1, states, nothing).sum(1, keepdim=True)  # [batch, 1, width]
    return SequenceClassifierOutput(logits=model.classifier(model.pooler(first)))


def _adapt(model: PreTrainedModel) -> None:
    encoder: Any = model.base_model.encoder
    config = model.config
    with torch.no_grad():
        rows, embeddings = _shared_rows(encoder), encoder.get_rel_embedding()
        for layer in encoder.layer:
            original = layer.attention.self
            layer.attention.self = _SelfAttention(original, _tables(original, embeddings), rows)
    # The layers' tables hold the projected rows.
    encoder.get_rel_embedding = lambda: None
    encoder.get_rel_pos = lambda *_: None
    encoder.get_attention_mask = lambda mask: create_bidirectional_mask(
        config=config, inputs_embeds=mask[..., None].float(), attention_mask=mask
    )
    _plain_norms(model)
    if isinstance(model, (DebertaForSequenceClassification, DebertaV2ForSequenceClassification)):
        model.forward = functools.partial(_classify, model)


def _of_config(config: Mapping[str, Any]) -> Family:
    """The family by whether tokens have positions besides distances.

    A ModelError rejects heads that are mixed with each other, and the first version with such positions.
    """
    if config.get("talking_head"):
        raise ModelError(
            "config.json has talking_head true: scores of all heads are mixed, which no operator here computes.",
            hint="Choose a checkpoint without it, such as deberta-base.",
        )
    if not config.get("position_biased_input", True):
        return FAMILY
    if config["model_type"] == "deberta":
        raise ModelError(
            "config.json has position_biased_input true (or does not say): a DeBERTa of the first version with a table "
            "of positions.",
            hint='Only its distances can be built: if it was trained so, set "position_biased_input": false.',
        )
    return _POSITIONS


_POSITIONS = Family(
    # DebertaV2Model reads these, which DebertaV2Config does not declare.
    known_config_keys=frozenset(
        {
            *(
                "attention_head_size",
                "conv_act",
                "conv_kernel_size",
                "norm_rel_ebd",
                "position_buckets",
                "share_att_key",
            ),
        }
    ),
    of_config=_of_config,
    adapt=_adapt,
    classifies_first=False,
    query_projections=lambda model: [
        (layer.attention.self, layer.attention.self.query_proj) for layer in model.base_model.encoder.layer
    ],
    conversion_unsupported_reason=UnsupportedReason.RELATIVE_POSITIONS,
    tuning_unsupported_reason=UnsupportedReason.RELATIVE_POSITIONS,
)

FAMILY = dataclasses.replace(
    _POSITIONS,
    learned_positions=False,
    relative_positions=True,
)
