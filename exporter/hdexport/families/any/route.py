"""The generic family: facts are inferred from a model's configuration and modules, and its code is traced as it is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from hdexport.attention.traced.model import keep_nothing, trace_as_it_is
from hdexport.families.any.behaviour import check_behaviour
from hdexport.families.any.model_info import infer_model_info
from hdexport.model.family import Family, ModelClasses, UnsupportedReason


def generic_family(classes: ModelClasses | None = None) -> Family:
    """The family of checkpoints of a model type without one.

    Args:
        classes: the classes of a checkpoint's code; None for transformers' classes.
    """
    family = Family(
        is_generic=True,
        classes=classes,
        honors_is_decoder=True,
        learned_positions=False,
        position_embedding_types=None,
        tuning_unsupported_reason=UnsupportedReason.NO_FAMILY,
        is_causal=True,
        embeddings=lambda model: None,
        conversion_unsupported_reason=UnsupportedReason.NO_FAMILY,
        token_types=0,
    )
    return dataclasses.replace(family, of_config=lambda config: _of_config(family, config))


def _of_config(family: Family, config: Mapping[str, Any]) -> Family:
    """The family of one checkpoint."""
    info = infer_model_info(config, family)
    key, max_positions = info.positions_key, info.max_positions
    return dataclasses.replace(
        family,
        of_config=None,
        tasks=info.tasks,
        task_unsupported_reason=UnsupportedReason.NEEDS_DECODER if info.has_decoder else UnsupportedReason.NO_CLASS,
        config_overrides=lambda config: {**info.values, **({} if key is None else {key: max_positions})},
        positions_key=key or "max_position_embeddings",
        keeps_table=info.has_table,
        relative_positions=key is None and not max_positions,
        padding_row=lambda config: config.pad_token_id if info.follows_padding else None,
        token_types=info.token_types,
        prepare=functools.partial(_prepare, max_positions=max_positions),
        adapt=_adapt,
    )


def _prepare(model: PreTrainedModel, *, max_positions: int) -> None:
    keep_nothing(model)
    check_behaviour(model, most_positions=max_positions)


def _adapt(model: PreTrainedModel) -> None:
    # If the model has positions, their extension has set this to the bundle's maximum length.
    trace_as_it_is(model, max_len=getattr(model.config, "max_position_embeddings", None))
