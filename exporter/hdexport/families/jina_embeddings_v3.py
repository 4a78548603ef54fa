"""Jina Embeddings v3: XLM-RoBERTa with rotary positions.

Source: Sturua et al., "jina-embeddings-v3: Multilingual Embeddings With Task LoRA" (2024).
"""

from __future__ import annotations

import dataclasses

from hdexport.families import gte

FAMILY = dataclasses.replace(gte.FAMILY, model_types=("jina_embeddings_v3",))
