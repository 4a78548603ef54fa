"""NEZHA in PyTorch, with the answers and the names of weights of transformers 4.

Source: Wei et al., "NEZHA: Neural Contextualized Representation for Chinese Language Understanding" (2019). All but the
embeddings and the attention is transformers' BERT.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import initialization
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.models.bert.modeling_bert import BertEncoder, BertOnlyMLMHead, BertPooler, BertPreTrainedModel

from hdexport.families.nezha.config import NezhaConfig


class NezhaEmbeddings(torch.nn.Module):
    """Embeddings of words and token types."""

    def __init__(self, config: NezhaConfig) -> None:
        super().__init__()
        self.word_embeddings = torch.nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.token_type_embeddings = torch.nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = torch.nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None) -> torch.Tensor:
        """[batch, tokens, hidden_size] of ids and types, both [batch, tokens]."""
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        return self.LayerNorm(self.word_embeddings(input_ids) + self.token_type_embeddings(types))


class NezhaSelfAttention(torch.nn.Module):
    """Attention in which keys and values have a row of sines added for their distance from the query.

    Attributes:
        reach: the distance, in tokens, that all beyond it count as.
        rows: [2 * reach + 1, head_dim], float32, of the distances -reach to reach of a key from a query.
    """

    rows: torch.Tensor

    def __init__(self, config: NezhaConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.query, self.key, self.value = (torch.nn.Linear(width, width) for _ in range(3))
        self.heads, self.reach = config.num_attention_heads, config.max_relative_position
        self.register_buffer("rows", _sinusoids(2 * self.reach + 1, width // self.heads), persistent=False)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any, **_: Any) -> tuple[torch.Tensor, None]:
        """[batch, tokens, hidden_size], the same of a mask that is added to scores, [batch, 1, 1 or tokens, tokens]."""
        query, key, value = (states.transpose(1, 2) for states in self.projected(hidden_states))
        places = torch.arange(hidden_states.shape[1])
        row = (places - places[:, None]).clamp(-self.reach, self.reach) + self.reach
        by_row = query @ self.rows.T  # [batch, heads, tokens, 2 * reach + 1]
        scores = query @ key.transpose(2, 3)
        scores = (scores + by_row.gather(3, row.expand_as(scores))) * query.shape[3] ** -0.5
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = scores.softmax(-1)
        by_row = torch.zeros_like(by_row).scatter_add(3, row.expand_as(weights), weights)
        return (weights @ value + by_row @ self.rows).transpose(1, 2).flatten(2), None

    def projected(self, hidden_states: torch.Tensor) -> list[torch.Tensor]:
        """Query, key and value, [batch, tokens, heads, head_dim]."""
        projections = self.query, self.key, self.value
        return [project(hidden_states).unflatten(2, (self.heads, -1)) for project in projections]


def _sinusoids(rows: int, width: int) -> torch.Tensor:
    """[rows, width], float32: sines and cosines of the number of a row, in turn, of falling frequency."""
    # As transformers computed them: rounding a frequency otherwise is visible in the last digits.
    frequency = torch.exp(torch.arange(0, width, 2).float() * (-math.log(10000.0) / width))
    angle = torch.arange(rows).float()[:, None] * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)


class _Nezha(BertPreTrainedModel):
    config: NezhaConfig
    config_class = NezhaConfig
    base_model_prefix = "nezha"
    _supports_sdpa = False
    _can_record_outputs = None

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, NezhaSelfAttention):
            initialization.copy_(module.rows, _sinusoids(*module.rows.shape))


class NezhaModel(_Nezha):
    """Embeddings and layers, and a pooler that classifiers read."""

    def __init__(self, config: NezhaConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings, self.encoder = NezhaEmbeddings(config), BertEncoder(config)
        for layer in self.encoder.layer:
            layer.attention.self = NezhaSelfAttention(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.post_init()

    def get_input_embeddings(self) -> torch.nn.Module:
        """The table of words."""
        return self.embeddings.word_embeddings

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPooling:
        """Compute a batch.

        Args:
            input_ids: [batch, tokens], int64.
            attention_mask: [batch, tokens], 0 for padding; None for none.
            token_type_ids: [batch, tokens], int64; None for zeros.
        """
        states = self.embeddings(input_ids, token_type_ids)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=states, attention_mask=attention_mask)
        states = self.encoder(states, attention_mask=mask).last_hidden_state
        return BaseModelOutputWithPooling(
            last_hidden_state=states, pooler_output=None if self.pooler is None else self.pooler(states)
        )


class NezhaForMaskedLM(_Nezha):
    """Predicts the tokens behind masks."""

    _tied_weights_keys = {  # noqa: RUF012 (as in transformers)
        "cls.predictions.decoder.weight": "nezha.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }

    def __init__(self, config: NezhaConfig) -> None:
        super().__init__(config)
        self.nezha, self.cls = NezhaModel(config, add_pooling_layer=False), BertOnlyMLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> torch.nn.Module:
        """The projection to words."""
        return self.cls.predictions.decoder

    def forward(self, *given: Any, **named: Any) -> MaskedLMOutput:
        """``logits`` [batch, tokens, vocab_size]; arguments as of `NezhaModel`."""
        return MaskedLMOutput(logits=self.cls(self.nezha(*given, **named).last_hidden_state))


class NezhaForSequenceClassification(_Nezha):
    """Classifies a text by its first token."""

    def __init__(self, config: NezhaConfig) -> None:
        super().__init__(config)
        self.nezha, self.classifier = NezhaModel(config), torch.nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, *given: Any, **named: Any) -> SequenceClassifierOutput:
        """``logits`` [batch, labels]; arguments as of `NezhaModel`."""
        return SequenceClassifierOutput(logits=self.classifier(self.nezha(*given, **named).pooler_output))


class NezhaForTokenClassification(_Nezha):
    """Classifies each token."""

    def __init__(self, config: NezhaConfig) -> None:
        super().__init__(config)
        self.nezha = NezhaModel(config, add_pooling_layer=False)
        self.classifier = torch.nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, *given: Any, **named: Any) -> TokenClassifierOutput:
        """``logits`` [batch, tokens, labels]; arguments as of `NezhaModel`."""
        return TokenClassifierOutput(logits=self.classifier(self.nezha(*given, **named).last_hidden_state))


class NezhaForQuestionAnswering(_Nezha):
    """Scores each token as the first and as the last of an answer."""

    def __init__(self, config: NezhaConfig) -> None:
        super().__init__(config)
        self.nezha = NezhaModel(config, add_pooling_layer=False)
        self.qa_outputs = torch.nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, *given: Any, **named: Any) -> QuestionAnsweringModelOutput:
        """``start_logits`` and ``end_logits``, [batch, tokens]; arguments as of `NezhaModel`."""
        start, end = self.qa_outputs(self.nezha(*given, **named).last_hidden_state).unbind(-1)
        return QuestionAnsweringModelOutput(start_logits=start, end_logits=end)
