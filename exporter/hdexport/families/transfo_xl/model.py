"""Transformer-XL in PyTorch, with the answers and the names of weights of transformers 4.

Source: Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context" (2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, initialization
from transformers.utils import ModelOutput

from hdexport.attention.relative.model import Distances, key_kinds, relative_node
from hdexport.families.transfo_xl.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from hdexport.families.transfo_xl.config import TransfoXLConfig
from hdexport.model.memory_cache import MASK, text_ends, updated_memory

LAST, STARTED = "last", "started"
"""Memories of a model that scores: the last token's state, [batch, d_model], and 1 once it is there, [batch, 1]."""

Mems = Mapping[str, torch.Tensor]
"""The memories, float32: [batch, memory, d_model] by the number of its layer, "0", and more by name."""


@dataclass
class TransfoXLOutput(ModelOutput):
    """States, [batch, tokens, d_model], and the memories for the next call."""

    last_hidden_state: torch.Tensor | None = None
    mems: dict[str, torch.Tensor] | None = None


@dataclass
class TransfoXLScores(ModelOutput):
    """Log-probabilities, [batch, tokens], float32, and the memories for the next call."""

    log_probabilities: torch.Tensor | None = None
    mems: dict[str, torch.Tensor] | None = None


class _FeedForward(torch.nn.Module):
    def __init__(self, config: TransfoXLConfig) -> None:
        super().__init__()
        self.CoreNet = torch.nn.Sequential(
            torch.nn.Linear(config.d_model, config.d_inner),
            torch.nn.ReLU(),
            torch.nn.Identity(),  # training's dropout, which keeps the last layer's name
            torch.nn.Linear(config.d_inner, config.d_model),
        )
        self.layer_norm = torch.nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.pre_lnorm = config.pre_lnorm

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.pre_lnorm:
            return states + self.CoreNet(self.layer_norm(states))
        return self.layer_norm(states + self.CoreNet(states))


class _Attention(torch.nn.Module):
    """Attention of the text to the memory and to itself.

    Attributes:
        distances: the distances of all texts, where the operator attends; None for PyTorch's attention.
    """

    def __init__(self, config: TransfoXLConfig) -> None:
        super().__init__()
        width = config.n_head * config.d_head
        self.qkv_net = torch.nn.Linear(config.d_model, 3 * width, bias=False)
        self.r_net = torch.nn.Linear(config.d_model, width, bias=False)
        self.o_net = torch.nn.Linear(width, config.d_model, bias=False)
        self.layer_norm = torch.nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.r_w_bias, self.r_r_bias = _bias(config), _bias(config)
        self.config, self.width = config, width
        self.distances: Distances | None = None

    def forward(
        self, states: torch.Tensor, memory: torch.Tensor | None, key_kind: torch.Tensor, sinusoids: torch.Tensor
    ) -> torch.Tensor:
        tokens, scale = states.shape[1], self.config.d_head**-0.5
        seen = states if memory is None else torch.cat([memory.to(states.dtype), states], dim=1)
        normalised = self.layer_norm(seen) if self.config.pre_lnorm else seen
        of_query, of_key, of_value = (
            self.qkv_net.weight[part * self.width : (part + 1) * self.width] for part in range(3)
        )
        text = normalised.narrow(1, seen.shape[1] - tokens, tokens)
        # The positions depend on constants only: a runtime computes them once. The slice of the text follows.
        positions = self.r_net(sinusoids.to(states.dtype)).unflatten(1, (self.config.n_head, -1)).transpose(0, 1)
        query, key, value = (
            self._heads(text, of_query),
            self._heads(normalised, of_key),
            self._heads(normalised, of_value),
        )
        biases = self.r_w_bias, self.r_r_bias
        if self.distances is None:
            reach = self.config.mem_len if self.config.same_length else 0
            attended = _attend(query, key, value, key_kind, positions, *biases, reach=reach, scale=scale)
        else:
            positions = self.distances.seen(positions, tokens=tokens, keys=seen.shape[1])
            record = self.distances.record
            attended = relative_node(query, key, value, key_kind, positions, *biases, record=record, scale=scale)
        added: torch.Tensor = states + self.o_net(attended.flatten(2))
        return added if self.config.pre_lnorm else self.layer_norm(added)

    def _heads(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, heads, d_head]."""
        return torch.nn.functional.linear(states, weight).unflatten(2, (self.config.n_head, -1))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_kind: torch.Tensor,
    positions: torch.Tensor,
    content_bias: torch.Tensor,
    position_bias: torch.Tensor,
    *,
    reach: int,
    scale: float,
) -> torch.Tensor:
    """The paper's attention, with its shift of rows; see `relative_node` for the arguments."""
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    tokens, keys = query.shape[2], key.shape[2]
    by_content = (query + content_bias[:, None]) @ key.transpose(2, 3)
    by_distance = (query + position_bias[:, None]) @ positions.transpose(1, 2)
    shifted = torch.nn.functional.pad(by_distance, (1, 0)).flatten(2)[..., tokens:].view_as(by_distance)
    distance = keys - tokens + torch.arange(tokens)[:, None] - torch.arange(keys)
    hidden = (distance < 0) | (key_kind == 0)[:, None, None, :]
    if reach:
        hidden = hidden | (distance >= reach)
    # The lowest number, where infinity would make NaN of the row of a token that sees nothing.
    scores = ((by_content + shifted) * scale).masked_fill(hidden, torch.finfo(query.dtype).min)
    return (scores.softmax(-1) @ value).transpose(1, 2)


class _Layer(torch.nn.Module):
    def __init__(self, config: TransfoXLConfig) -> None:
        super().__init__()
        self.dec_attn, self.pos_ff = _Attention(config), _FeedForward(config)

    def forward(
        self, states: torch.Tensor, memory: torch.Tensor | None, key_kind: torch.Tensor, sinusoids: torch.Tensor
    ) -> torch.Tensor:
        return self.pos_ff(self.dec_attn(states, memory, key_kind, sinusoids))


class _TransfoXL(PreTrainedModel):
    config: TransfoXLConfig
    config_class = TransfoXLConfig
    base_model_prefix = "transformer"

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        super()._init_weights(module)
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, torch.nn.ParameterList):
                initialization.normal_(parameter, std=self.config.proj_init_std)
            elif name in ("r_w_bias", "r_r_bias", "cluster_weight"):
                initialization.normal_(parameter, std=self.config.init_std)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Name of a weight -> name of the one that it is; transformers' has none where no embeddings are tied."""
        if not all_submodels:
            return dict(self._tied_weights_keys or {})
        return super().get_expanded_tied_weights_keys(all_submodels=True)


class TransfoXLModel(_TransfoXL):
    """Embeddings and layers.

    Attributes:
        sinusoids: [distances, d_model], float32, of all distances where the operator attends; None else.
    """

    def __init__(self, config: TransfoXLConfig) -> None:
        super().__init__(config)
        self.word_emb = AdaptiveEmbedding(config)
        self.layers = torch.nn.ModuleList(_Layer(config) for _ in range(config.n_layer))
        if not config.untie_r:
            self.r_w_bias, self.r_r_bias = _bias(config), _bias(config)
            self._tied_weights_keys = {
                f"layers.{layer}.dec_attn.{name}": name
                for layer in range(config.n_layer)
                for name in ("r_w_bias", "r_r_bias")
            }
        self.sinusoids: torch.Tensor | None = None
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, mems: Mems | None = None, **_: Any
    ) -> TransfoXLOutput:
        """Compute a segment.

        Args:
            input_ids: [batch, tokens], int64.
            attention_mask: [batch, tokens], 0 for padding; None for none.
            mems: memory of the segment before; None for the first segment, which attends to zeros.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mems = self._first_mems(len(input_ids)) if mems is None else mems
        states, left = self.word_emb(input_ids), dict[str, torch.Tensor]()
        kinds = key_kinds(mask, mems.get(MASK))
        sinusoids = self._sinusoids(kinds.shape[1]) if self.sinusoids is None else self.sinusoids
        ends = text_ends(mask)
        if MASK in mems:
            left[MASK] = updated_memory(mems[MASK], mask, ends)
        for number, layer in enumerate(self.layers):
            memory = mems.get(str(number))
            if memory is not None:
                left[str(number)] = updated_memory(memory, states, ends)
            states = layer(states, memory, kinds, sinusoids)
        return TransfoXLOutput(last_hidden_state=states, mems=left)

    def _first_mems(self, rows: int) -> dict[str, torch.Tensor]:
        size = self.config.mem_len
        if size < 1:
            return {}
        zeros = torch.zeros(rows, size, self.config.d_model)
        return {MASK: torch.ones(rows, size), **dict.fromkeys(map(str, range(self.config.n_layer)), zeros)}

    def _sinusoids(self, keys: int) -> torch.Tensor:
        """[keys, d_model] of the distances keys - 1 to 0: their sines, and then their cosines."""
        distance = torch.arange(keys - 1, -1, -1, dtype=torch.float32)
        if self.config.clamp_len > 0:
            distance = distance.clamp(max=self.config.clamp_len)
        width = self.config.d_model
        angle = torch.outer(distance, 1 / 10000 ** (torch.arange(0.0, width, 2.0) / width))
        return torch.cat([angle.sin(), angle.cos()], dim=-1)


class TransfoXLLMHeadModel(_TransfoXL):
    """The log-probability of each token after the tokens before; weights as in transformers 4's class of that name."""

    def __init__(self, config: TransfoXLConfig) -> None:
        super().__init__(config)
        self.transformer, self.crit = TransfoXLModel(config), AdaptiveSoftmax(config)
        self._tied_weights_keys = self._ties(config)
        self.post_init()

    def _ties(self, config: TransfoXLConfig) -> dict[str, str]:
        ties = {}
        if config.tie_word_embeddings:
            for index in range(len(self.crit.out_layers)):
                ties[f"crit.out_layers.{index}.weight"] = f"transformer.word_emb.emb_layers.{index}.weight"
        projections = len(self.transformer.word_emb.emb_projs)
        for index, is_tied in enumerate(config.tie_projs or ()):
            if is_tied and projections:
                # One table has one projection, which all of its clusters may share.
                ties[f"crit.out_projs.{index}"] = f"transformer.word_emb.emb_projs.{min(index, projections - 1)}"
        return ties

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, mems: Mems | None = None, **_: Any
    ) -> TransfoXLScores:
        """Score a segment: log p(token | the tokens and the memory before it).

        Args:
            input_ids: [batch, tokens], int64.
            attention_mask: [batch, tokens], 0 for padding, whose scores are 0; None for none.
            mems: memory of the segment before; None for the first segment, whose first token has the score 0.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        output = self.transformer(input_ids=input_ids, attention_mask=mask, mems=mems)
        states = output.last_hidden_state
        if mems is None or LAST not in mems:
            mems = {LAST: torch.zeros_like(states[:, 0]), STARTED: torch.zeros_like(states[:, 0, :1])}
        last, started = mems[LAST][:, None].to(states.dtype), mems[STARTED]
        follows = torch.nn.functional.pad(mask[:, :-1], (1, 0)) == 1  # whether a token's predecessor is in the segment
        before = torch.where(follows.unsqueeze(-1), torch.cat([last, states[:, :-1]], dim=1), last)
        is_predicted = (mask == 1) & (follows | (started > 0))
        scores = torch.where(is_predicted, self.crit(before, input_ids), 0.0)
        ends = text_ends(mask)
        output.mems[LAST] = updated_memory(mems[LAST][:, None], states, ends)[:, 0]
        output.mems[STARTED] = updated_memory(started, mask, ends)
        return TransfoXLScores(log_probabilities=scores, mems=output.mems)


def _bias(config: TransfoXLConfig) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(config.n_head, config.d_head))
