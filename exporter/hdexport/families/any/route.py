"""The family of a model whose type no family has: its facts are found, and its code is traced as it is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hdexport.attention.traced.model import keep_nothing, trace_as_it_is
from hdexport.families.any.behaviour import check_behaviour
from hdexport.families.any.model_info import InferredModelInfo, infer_model_info
from hdexport.model.family import Family, ModelClasses

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NEEDS_A_FAMILY = "needs a family for its type, and none has been written (CONTRIBUTING.md, Add a model family)"

NEEDS_A_FAMILY = f"that {_NEEDS_A_FAMILY}"
"""Why a model is built as it is and not changed, as the end of a sentence."""


class _Every(tuple[str, ...]):
    """Every kind of positions: `infer_model_info` refuses those that the model's code does not read."""

    def __contains__(self, _: object) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class AnyFamily(Family):
    """A model without a family: nothing of it is changed.

    Attributes:
        facts: of a checkpoint; None before its ``config.json`` was read.
    """

    facts: InferredModelInfo | None = None

    is_written = False
    runs_decoders = True
    asks_by_position_ids = False
    why_not_scaled = NEEDS_A_FAMILY
    position_embedding_types = _Every()

    @property
    def keeps_table(self) -> bool:
        """Whether there is a table of positions."""
        return self.facts is not None and self.facts.has_table

    @property
    def token_types(self) -> int | None:  # type: ignore[override]
        """How many there are."""
        return 0 if self.facts is None else self.facts.token_types

    @property
    def has_sdpa(self) -> bool:
        """Whether the checkpoint's class computes attention by it."""
        return self.facts is None or self.facts.has_sdpa


def any_family(model_type: str, classes: ModelClasses | None = None) -> Family:
    """The family of checkpoints of a type without one. `classes` are those of a checkpoint's own code; None for the
    library's."""
    family = AnyFamily(
        model_types=(model_type,),
        classes=classes,
        learned_positions=False,
        is_causal=True,
        embeddings=lambda model: None,
        why_not_converted=NEEDS_A_FAMILY,
        why_not_tuned=NEEDS_A_FAMILY,
    )
    return dataclasses.replace(family, of_config=lambda config: _with_facts(family, config))


def _with_facts(family: AnyFamily, config: Mapping[str, Any]) -> Family:
    """The family of one checkpoint."""
    facts = infer_model_info(config, family)
    key, most = facts.positions_key, facts.most_positions
    return dataclasses.replace(
        family,
        facts=facts,
        of_config=None,
        tasks=facts.tasks,
        why_not_other_tasks=family.why_not_other_tasks if facts.is_half else "has no class with its outputs",
        newer_keys=lambda config: {**facts.values, **({} if key is None else {key: most})},
        positions_key=key or "max_position_embeddings",
        counts_distances=key is None and not most,
        padding_row=lambda config: config.pad_token_id if facts.follows_padding else None,
        why_not_extended=f"more {_NEEDS_A_FAMILY}" if facts.has_table else None,
        encoder=_encoder if facts.is_half else family.encoder,
        prepare=functools.partial(_prepare, most_positions=most),
        adapt=_adapt,
    )


def _encoder(model: Any) -> PreTrainedModel:
    encoder: PreTrainedModel = model.get_encoder()
    return encoder


def _prepare(model: PreTrainedModel, *, most_positions: int) -> None:
    keep_nothing(model)
    check_behaviour(model, most_positions=most_positions)


def _adapt(model: PreTrainedModel) -> None:
    # Where there are positions, their extension has set it to the bundle's longest text.
    trace_as_it_is(model, max_len=getattr(model.config, "max_position_embeddings", None))
