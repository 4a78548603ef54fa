"""The Python code of a checkpoint: an encoder whose scores fall with distance (ALiBi), by PyTorch's fused attention.

`fault` of its configuration makes it wrong on purpose.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class SlopesConfig(PreTrainedConfig):
    model_type = "slopes"

    def __init__(
        self,
        vocab_size: int = 120,
        hidden_size: int = 32,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        fault: str = "",
        slope_base: float = 0.5,
        **others: object,
    ) -> None:
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.fault, self.slope_base = fault, slope_base
        super().__init__(**others)


class SlopesLayer(torch.nn.Module):
    def __init__(self, config: SlopesConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads, self.fault = config.num_attention_heads, config.fault
        self.projection, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.wide, self.narrow = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.norm, self.last_norm = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)

    def forward(self, states: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        query, key, value = self.projection(states).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        states = self.norm(states + self.out(seen.transpose(1, 2).flatten(2)))
        if self.fault == "dropout":
            states = torch.nn.functional.dropout(states, 0.1, training=True)
        return self.last_norm(states + self.narrow(torch.nn.functional.gelu(self.wide(states))))


class SlopesModel(PreTrainedModel):
    config_class = SlopesConfig
    base_model_prefix = "slopes"
    _supports_sdpa = True

    def __init__(self, config: SlopesConfig) -> None:
        super().__init__(config)
        self.words = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.layer = torch.nn.ModuleList(SlopesLayer(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.words

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, return_dict: bool = True
    ) -> BaseModelOutput:
        states, fault = self.words(input_ids), self.config.fault
        place = torch.arange(input_ids.shape[1])
        heads = torch.arange(1, self.config.num_attention_heads + 1)
        distance = (place[:, None] - place[None, :]).abs()
        bias = -(self.config.slope_base**heads)[:, None, None] * distance  # [heads, tokens, tokens]
        # Python's len() gives a number, and a trace keeps it.
        batch = len(input_ids) if fault == "frozen" else input_ids.shape[0]
        bias = bias[None].expand(batch, -1, -1, -1)
        if fault == "left":  # Earlier tokens alone, and no mask: padding on the right changes nothing.
            bias = bias.masked_fill(place[None, :] > place[:, None], torch.finfo(states.dtype).min)
        elif attention_mask is not None and fault != "leak":
            bias = bias.masked_fill(attention_mask[:, None, None, :] == 0, torch.finfo(states.dtype).min)
        if fault == "lengths" and input_ids.shape[1] > 60:
            states = states * 1.5
        if fault == "multiples" and input_ids.shape[1] % 77 == 0:
            states = states * 1.5
        if fault == "batches" and input_ids.shape[0] > 8:
            states = states * 1.5
        if fault == "numbers":
            states = states / (states - states)
        if fault == "padding" and attention_mask is not None:
            states = states / attention_mask.amin(1)[:, None, None]
        if fault == "calls":
            self.calls = getattr(self, "calls", 0) + 1
            states = states * self.calls
        if fault == "short":  # As BigBird's code: from the first short text on, for good.
            self.was_short = getattr(self, "was_short", False) or input_ids.shape[1] < 30
            states = states.flip(-1) if self.was_short else states
        if fault == "batch":
            states = states - states.mean(0, keepdim=True)
        for layer in self.layer:
            states = layer(states, bias)
        return BaseModelOutput(last_hidden_state=states)
