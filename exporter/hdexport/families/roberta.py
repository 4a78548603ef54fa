"""RoBERTa and its kin: learned positions that start after the padding row."""

from __future__ import annotations

from hdexport.model.family import Family

FAMILY = Family(
    model_types=("camembert", "data2vec-text", "roberta", "xlm-roberta", "xlm-roberta-xl"),
    padding_row=lambda config: int(config.pad_token_id),
)
