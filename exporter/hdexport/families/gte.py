"""GTE: BERT with rotary positions and gated feed-forward networks.

Source: Zhang et al., "mGTE: Generalized Long-Context Text Representation and Reranking Models" (2024).
"""

from __future__ import annotations

from hdexport.model.family import Family
from hdexport.model.rotary import use_rotary_tables

FAMILY = Family(
    model_types=("gte",),
    keys_of_other_code=frozenset({"pack_qkv"}),
    learned_positions=False,
    stretches_rotary=True,
    adapt=use_rotary_tables,
    why_not_converted="transformers has no module of its layers alone, which another attention could wrap",
    why_not_tuned="its positions are computed, and none is learned",
)
