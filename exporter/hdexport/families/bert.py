"""BERT and its kin: learned positions that count from row 0."""

from __future__ import annotations

from hdexport.families.family import Family

__all__ = ["FAMILY"]

FAMILY = Family(model_types=("albert", "bert", "distilbert", "electra", "ernie"))
