"""What the pipeline must know of a model family."""

from __future__ import annotations

__all__ = ["Family"]

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _nothing_to_adapt(model: PreTrainedModel) -> None:
    """The family's attention is reached through the library's attention interface."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family's embeddings and attention map to ours.

    Attributes:
        model_types: the ``model_type`` values of ``config.json`` that belong to the family.
        padding_row: row of the position table that padding tokens use, or None where positions count from row 0.
            Where there is one, real positions start at the row after it and their ids follow the padding rule
            ``cumsum(is_real) * is_real + padding_row``.
        shares_layers: whether all layers use the same weights. Such a model is chosen for its size, and each profile
            of an engine repeats the program of every layer (8 MB for 12), so it gets one profile unless asked.
        adapt: maps an attention that the library's attention interface does not reach to our operators, in place.
    """

    model_types: tuple[str, ...]
    padding_row: Callable[[Any], int | None] = field(default=lambda config: None)
    adapt: Callable[[PreTrainedModel], None] = _nothing_to_adapt
    shares_layers: bool = False

    def first_row(self, config: Any) -> int:
        """Row of the position table that the first real token uses."""
        padding_row = self.padding_row(config)
        return 0 if padding_row is None else padding_row + 1

    def embeddings(self, model: PreTrainedModel) -> Any:
        """The module of word, position and, for some, token-type embeddings."""
        return model.base_model.embeddings
