"""The modules after a model of transformers in a graph."""

from __future__ import annotations

import torch


class Head(torch.nn.Module):
    """Makes a task's outputs of one of the model's.

    Attributes:
        reads: name of the model's output.
    """

    reads = "last_hidden_state"

    def outputs(
        self, states: torch.Tensor, attention_mask: torch.Tensor, pooled_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """The task's outputs, in the order of `hdruntime.bundle.task_formats`.

        Args:
            states: [batch, tokens, width], the model's output, in its dtype.
            attention_mask: [batch, tokens], int64, 1 for real tokens.
            pooled_mask: the same, 1 for tokens that are pooled; None for all real tokens.

        Returns:
            float32 each.
        """
        return (self(states.float(), attention_mask),)
