"""BERT and its kin: learned positions that count from row 0."""

from __future__ import annotations

from hdexport.model.family import Family

FAMILY = Family()
