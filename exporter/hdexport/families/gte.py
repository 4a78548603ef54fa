"""GTE: BERT with rotary positions and gated feed-forward networks; Jina Embeddings v3 has plain ones.

Sources: Sturua et al., "jina-embeddings-v3: Multilingual Embeddings With Task LoRA" (2024);
 Zhang et al., "mGTE: Generalized Long-Context Text Representation and Reranking Models" (2024).
"""

from __future__ import annotations

from hdexport.model.family import Family, UnsupportedReason
from hdexport.model.rotary import use_rotary_tables

FAMILY = Family(
    known_config_keys=frozenset({"pack_qkv"}),
    learned_positions=False,
    scales_rope=True,
    adapt=use_rotary_tables,
    conversion_unsupported_reason=UnsupportedReason.NO_STACK_OF_LAYERS,
)
