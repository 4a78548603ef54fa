"""UltraBERT: rotary positions, windows around each token in most layers, and heads that share keys."""

from __future__ import annotations

import functools

from transformers import PreTrainedModel, UltrabertForSequenceClassification

from hdexport.families.modernbert import classify
from hdexport.model.family import Family, UnsupportedReason
from hdexport.model.half_precision import use_root_mean_squares
from hdexport.model.rotary import use_rotary_tables


def _adapt(model: PreTrainedModel) -> None:
    use_rotary_tables(model)
    use_root_mean_squares(model)
    if isinstance(model, UltrabertForSequenceClassification):
        model.forward = functools.partial(classify, model)


FAMILY = Family(
    learned_positions=False,
    scales_rope=True,
    embeddings=lambda model: model.base_model,
    adapt=_adapt,
    conversion_unsupported_reason=UnsupportedReason.NATIVE_WINDOWS,
)
