"""RoBERTa and its kin: learned positions that start after the padding row."""

from __future__ import annotations

from hdexport.model.family import Family

FAMILY = Family(
    padding_row=lambda config: int(config.pad_token_id),
)
