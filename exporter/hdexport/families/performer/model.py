"""Performer in PyTorch, with the answers and the names of weights of lucidrains' performer-pytorch.

Source: Choromanski et al., "Rethinking Attention with Performers" (2021).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

from hdexport.attention.favor import FavorAttention
from hdexport.attention.favor.model import favor_node
from hdexport.families.performer.config import PerformerConfig
from hdplugins.attention.favor.reference import draw_projection

EPSILON = 1e-4
"""Least feature."""


class _Positions(torch.nn.Module):
    """The table of positions: ``emb`` in a checkpoint, ``position_embeddings`` to code that extends it."""

    def __init__(self, config: PerformerConfig) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(config.max_seq_len, config.dim)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("emb" if name == "position_embeddings" else name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__("emb" if name == "position_embeddings" else name, value)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.emb(rows)


class _Sinusoids(torch.nn.Module):
    """Sines of the products of positions with frequencies, and after them their cosines.

    Attributes:
        frequency: [width / 2], float32.
    """

    frequency: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("frequency", self.frequencies(width), persistent=False)

    @staticmethod
    def frequencies(width: int) -> torch.Tensor:
        """[width / 2], float32, rounded as transformers does."""
        return 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """[1 or batch, tokens, width], float32."""
        angle = position_ids[..., None].float() * self.frequency
        return torch.cat([angle.sin(), angle.cos()], dim=-1)


def _rotated(states: torch.Tensor, sinusoids: torch.Tensor) -> torch.Tensor:
    """States [batch, tokens, heads, dim_head] whose pairs of neighbours turn, computed in float32.

    Args:
        sinusoids: [1 or batch, tokens, dim_head].
    """
    sine, cosine = sinusoids[:, :, None].chunk(2, dim=-1)
    first, second = states.float().unflatten(3, (-1, 2)).unbind(4)
    rotated = torch.stack([first * cosine - second * sine, second * cosine + first * sine], dim=4)
    return rotated.flatten(3).to(states.dtype)


class _Features(torch.nn.Module):
    """The directions of a layer's features, and attention by them in plain PyTorch."""

    projection_matrix: torch.Tensor

    def __init__(self, config: PerformerConfig) -> None:
        super().__init__()
        self.register_buffer("projection_matrix", torch.empty(config.features, config.dim_head))

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, *, compat: bool
    ) -> torch.Tensor:
        """[batch, tokens, heads, dim_head], as the states; `mask` is [batch, tokens], bool."""
        query, key, value = (states.transpose(1, 2) for states in (query, key, value))
        real = mask[:, None, :, None]
        seen = torch.ones_like(real) if compat else real
        by_query, query_half = self._products(query)
        of_query = (by_query - query_half - by_query.amax(-1, keepdim=True)).exp() + EPSILON
        by_key, key_half = self._products(key)
        highest = torch.where(seen, by_key, torch.finfo(by_key.dtype).min).amax((-1, -2), keepdim=True)
        of_key = torch.where(seen, (by_key - key_half - highest).exp() + EPSILON, 0.0)
        numerators = of_query @ (of_key.transpose(2, 3) @ torch.where(real, value, 0.0))
        denominators = (of_query * of_key.sum(2, keepdim=True)).sum(-1, keepdim=True)
        # A text without keys has nothing to divide.
        return (numerators / torch.where(denominators == 0, 1.0, denominators)).transpose(1, 2)

    def _products(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = states * states.shape[-1] ** -0.25
        return scaled @ self.projection_matrix.T, scaled.square().sum(-1, keepdim=True) / 2


class _Attention(torch.nn.Module):
    """Attention of all tokens to all.

    Attributes:
        record: the attention's record, where the operator attends; None for PyTorch's attention.
    """

    def __init__(self, config: PerformerConfig) -> None:
        super().__init__()
        width, self.heads = config.heads * config.dim_head, config.heads
        self.fast_attention = _Features(config)
        self.to_q, self.to_k, self.to_v = (torch.nn.Linear(config.dim, width, bias=config.qkv_bias) for _ in range(3))
        self.to_out = torch.nn.Linear(width, config.dim, bias=config.attn_out_bias)
        self.record: FavorAttention | None = None

    def forward(
        self, states: torch.Tensor, mask: torch.Tensor, sinusoids: torch.Tensor | None, *, compat: bool
    ) -> torch.Tensor:
        query, key, value = (
            projection(states).unflatten(2, (self.heads, -1)) for projection in (self.to_q, self.to_k, self.to_v)
        )
        if sinusoids is not None:
            query, key = _rotated(query, sinusoids), _rotated(key, sinusoids)
        if self.record is None:
            attended = self.fast_attention(query, key, value, mask, compat=compat)
        else:
            directions, scale = self.fast_attention.projection_matrix, query.shape[-1] ** -0.5
            attended = favor_node(query, key, value, mask, directions, record=self.record, scale=scale)
        return self.to_out(attended.flatten(2))


class _FeedForward(torch.nn.Module):
    def __init__(self, config: PerformerConfig) -> None:
        super().__init__()
        inner = config.dim * config.ff_mult
        self.w1 = torch.nn.Linear(config.dim, inner * (2 if config.ff_glu else 1))
        self.act, self.glu = torch.nn.GELU(), config.ff_glu
        self.w2 = torch.nn.Linear(inner, config.dim)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        hidden = self.w1(states)
        if self.glu:
            gated, gate = hidden.chunk(2, dim=-1)
            hidden = self.act(gated) * gate
        else:
            hidden = self.act(hidden)
        return self.w2(hidden)


class _Within(torch.nn.Module):
    """A module that is called ``fn`` in another: performer-pytorch cuts feed-forward layers into chunks there."""

    def __init__(self, fn: torch.nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        return self.fn(*given, **named)


class _PreNorm(_Within):
    def __init__(self, config: PerformerConfig, fn: torch.nn.Module) -> None:
        super().__init__(fn)
        self.norm = torch.nn.LayerNorm(config.dim)

    def forward(self, states: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        return states + super().forward(self.norm(states), *given, **named)


class _Layers(torch.nn.Module):
    def __init__(self, config: PerformerConfig) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleList([
                _PreNorm(config, _Attention(config)),
                _PreNorm(config, _Within(_FeedForward(config))),
            ])
            for _ in range(config.depth)
        )  # fmt: skip

    def forward(
        self, states: torch.Tensor, mask: torch.Tensor, sinusoids: torch.Tensor | None, *, compat: bool
    ) -> torch.Tensor:
        layer: Any
        for layer in self.layers:
            states = layer[1](layer[0](states, mask, sinusoids, compat=compat))
        return states


class _Performer(torch.nn.Module):
    def __init__(self, config: PerformerConfig) -> None:
        super().__init__()
        self.net = _Layers(config)


class PerformerModel(PreTrainedModel):
    """The states of a text's tokens; weights as in performer-pytorch's ``PerformerLM``.

    Attributes:
        compat: whether padding counts as keys whose values are 0, as in performer-pytorch.
    """

    config_class = PerformerConfig
    base_model_prefix = ""

    def __init__(self, config: PerformerConfig) -> None:
        super().__init__(config)
        self.token_emb = torch.nn.Embedding(config.num_tokens, config.dim)
        self.pos_emb = _Sinusoids(config.dim) if config.rotary_position_emb else _Positions(config)
        self.layer_pos_emb = _Sinusoids(config.dim_head) if config.rotary_position_emb else None
        self.performer = _Performer(config)
        self.norm = torch.nn.LayerNorm(config.dim)
        self.compat = False
        if type(self) is PerformerModel:
            self.post_init()

    def attentions(self) -> list[_Attention]:
        """The attention of each layer."""
        return [module for module in self.modules() if isinstance(module, _Attention)]

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        super()._init_weights(module)
        if isinstance(module, _Features):
            features, head_dim = module.projection_matrix.shape
            module.projection_matrix.copy_(draw_projection(0, features=features, head_dim=head_dim))
        elif isinstance(module, _Sinusoids):
            module.frequency.copy_(_Sinusoids.frequencies(2 * len(module.frequency)))

    def get_input_embeddings(self) -> torch.nn.Module:
        """The table of tokens."""
        return self.token_emb

    def set_input_embeddings(self, value: Any) -> None:
        """Exchange it."""
        self.token_emb = value

    def _states(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        tokens = self.token_emb(input_ids)
        states = tokens + self.pos_emb(position_ids).to(tokens.dtype)
        sinusoids = None if self.layer_pos_emb is None else self.layer_pos_emb(position_ids)
        return self.norm(self.performer.net(states, mask.bool(), sinusoids, compat=self.compat))

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutput:
        """Compute the states, [batch, tokens, dim].

        Args:
            input_ids: [batch, tokens], int64.
            attention_mask: [batch, tokens], 0 for padding; None for none.
            position_ids: [1 or batch, tokens], int64; None for 0, 1, ...
        """
        return BaseModelOutput(last_hidden_state=self._states(input_ids, attention_mask, position_ids))


class PerformerForMaskedLM(PerformerModel):
    """The logits of a text's tokens, whose head is ``to_out``, or the table of tokens."""

    def __init__(self, config: PerformerConfig) -> None:
        super().__init__(config)
        self.to_out = torch.nn.Linear(config.dim, config.num_tokens, bias=not config.tie_embed)
        if config.tie_embed:
            self._tied_weights_keys = {"to_out.weight": "token_emb.weight"}
        self.post_init()

    def get_output_embeddings(self) -> torch.nn.Module:
        """The head."""
        return self.to_out

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **_: Any,
    ) -> MaskedLMOutput:
        """Compute the logits, [batch, tokens, num_tokens]; arguments as of `PerformerModel`."""
        return MaskedLMOutput(logits=self.to_out(self._states(input_ids, attention_mask, position_ids)))
