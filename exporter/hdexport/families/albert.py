"""ALBERT: BERT's positions in narrower tables, and one layer's weights for all layers."""

from __future__ import annotations

from hdexport.model.family import Family

FAMILY = Family(shares_layers=True)
