"""Windows that reach across segments: each layer carries keys and values of the tokens before the text.

The operator attends among as many queries as keys, so the memory's rows have queries of zeros, and their results are
cut off. That costs (memory + tokens) / tokens of the attention itself, and nothing of the projections.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from hdexport.attention.window.model import asking_kinds, sliding_window_node
from hdexport.model.carried_states import MASK, CallStates, remembered, text_ends

if TYPE_CHECKING:
    from hdexport.attention.window.kind import Window


@dataclass(frozen=True)
class CarriedMask:
    """The values that windowed layers share: made once for each call, and handed on as the library's mask is.

    Attributes:
        window: the tokens that a token sees; without global tokens.
        token_kind: [batch, memory + tokens], int32, 0 for memory that is not there yet, -1 for masked tokens, which see
            the others and are not seen, else 1.
        ends: [batch], int64, tokens of each text up to its last real one.
        memories: by the layers' numbers, [batch, memory, 2 * width]: keys and, after them, values.
        layers: numbers of the layers that have not attended yet.
    """

    differs_by_layer: ClassVar[bool] = True
    """For `hdexport.graph.repeated_layers`: no two layers have the same nodes."""

    window: Window
    token_kind: torch.Tensor
    ends: torch.Tensor
    carried: CallStates
    layers: Iterator[int] = field(default_factory=itertools.count)

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[batch, tokens, heads, head_dim]; see `hdexport.attention.interface.LayerMask`."""
        # Calls are counted, not modules: a model may use one layer several times.
        layer, heads, head_dim = next(self.layers), query.shape[1], query.shape[3]
        before = self.carried.given(layer)
        states = torch.cat([key, value], dim=1).transpose(1, 2).flatten(2)  # [batch, tokens, 2 * width]
        self.carried.leave(layer, remembered(before, states, self.ends))
        carried = before.to(key.dtype).unflatten(2, (2 * heads, head_dim)).transpose(1, 2)
        keys, values = carried.chunk(2, dim=1)  # [batch, heads, memory, head_dim]
        attended = sliding_window_node(
            torch.cat([torch.zeros_like(keys), query], dim=2),
            torch.cat([keys, key], dim=2),
            torch.cat([values, value], dim=2),
            self.token_kind,
            left=self.window.tokens,
            right=self.window.after,
            dilation=self.window.dilation,
            global_bound=0,
            scale=scale,
        )
        return attended[:, :, before.shape[1] :].transpose(1, 2).contiguous()


def carried_mask(window: Window, attention_mask: torch.Tensor, carried: CallStates) -> CarriedMask:
    """The mask of layers with such a window, and which tokens the next call finds in its memory.

    Args:
        window: the tokens that a token sees.
        attention_mask: [batch, tokens], bool, True for real tokens.
        memories: of the call.
    """
    there, ends = carried.given(MASK), text_ends(attention_mask)
    carried.leave(MASK, remembered(there, attention_mask, ends))
    kinds = torch.cat([there.to(torch.int32), asking_kinds(attention_mask)], dim=1)
    return CarriedMask(window, kinds, ends, carried)
