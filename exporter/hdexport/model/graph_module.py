"""What is traced: a model of one task, with the inputs and outputs that its graph will have."""

from __future__ import annotations

__all__ = ["OUTPUTS_OF_TASK", "GraphModule"]

from typing import TYPE_CHECKING, Any

import torch

from hdexport.checkpoint.sentence_pooling import SentencePooling
from hdexport.model.tasks import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTPUTS_OF_TASK: dict[Task, dict[str, tuple[str, ...]]] = {
    Task.FEATURE_EXTRACTION: {"last_hidden_state": ("batch", "tokens", "hidden_size")},
    Task.SENTENCE_SIMILARITY: {
        "token_embeddings": ("batch", "tokens", "hidden_size"),
        "sentence_embedding": ("batch", "embedding_size"),
    },
    Task.FILL_MASK: {"logits": ("batch", "tokens", "vocab_size")},
    Task.TEXT_CLASSIFICATION: {"logits": ("batch", "labels")},
    Task.TOKEN_CLASSIFICATION: {"logits": ("batch", "tokens", "labels")},
    Task.QUESTION_ANSWERING: {"start_logits": ("batch", "tokens"), "end_logits": ("batch", "tokens")},
}
"""Task -> name of each output -> its axes. All outputs are float32."""


class GraphModule(torch.nn.Module):
    """A model with positional tensors in and a tuple of float32 tensors out.

    Args:
        model: the Hugging Face model with the task's head.
        task: decides the outputs.
        has_token_types: whether ``token_type_ids`` is an input.
        folded_token_types: whether the token-type lookup was folded; the embeddings then ask for ids they ignore.
        folded_positions: whether the position lookup was folded; likewise.
        has_global_attention: whether ``global_attention_mask`` is an input.
        pooling: what follows the encoder in a sentence-similarity model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        task: Task,
        *,
        has_token_types: bool,
        folded_token_types: bool,
        folded_positions: bool,
        has_global_attention: bool = False,
        pooling: SentencePooling | None = None,
    ) -> None:
        super().__init__()
        self.model, self.task, self.pooling = model, task, pooling
        self.has_token_types, self.folded_token_types = has_token_types, folded_token_types
        self.folded_positions, self.has_global_attention = folded_positions, has_global_attention

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, arguments of ``forward``; each is [batch, tokens], int64."""
        optional = {"token_type_ids": self.has_token_types, "global_attention_mask": self.has_global_attention}
        return ("input_ids", "attention_mask", *(name for name, is_input in optional.items() if is_input))

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        global_attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Run the model; the outputs are those of `OUTPUTS_OF_TASK`, in order.

        ``position_ids`` are for asking PyTorch about shifted positions; a graph has no such input.
        """
        extra: dict[str, Any] = {} if position_ids is None else {"position_ids": position_ids}
        if self.has_token_types:
            extra["token_type_ids"] = token_type_ids
        elif self.folded_token_types:
            # Never looked at; without ids the embeddings would gather them from a buffer.
            extra["token_type_ids"] = input_ids
        if self.has_global_attention:
            extra["global_attention_mask"] = global_attention_mask
        if self.folded_positions:
            # Only its shape is looked at; the model's own ids are a slice that clamps the length to the table.
            extra["position_ids"] = input_ids
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **extra)
        if self.pooling is not None:
            tokens = outputs.last_hidden_state.float()
            return tokens, self.pooling(tokens, attention_mask)
        return tuple(getattr(outputs, name).float() for name in OUTPUTS_OF_TASK[self.task])
