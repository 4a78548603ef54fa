"""GTE: BERT with rotary positions and gated feed-forward networks.

Source: Zhang et al., "mGTE: Generalized Long-Context Text Representation and Reranking Models" (2024).
"""

from __future__ import annotations

from hdexport.model.family import Family
from hdexport.model.rotary import use_rotary_tables
from hdexport.model.task import ENCODER_TASKS
from hdruntime.bundle.manifest import Task

FAMILY = Family(
    model_types=("gte",),
    keys_of_other_code=frozenset({"pack_qkv"}),
    # transformers has no class of it for questions.
    tasks=tuple(task for task in ENCODER_TASKS if task is not Task.QUESTION_ANSWERING),
    learned_positions=False,
    stretches_rotary=True,
    adapt=use_rotary_tables,
    why_not_converted="transformers has no module of its layers alone, which another attention could wrap",
    why_not_tuned="its positions are computed, and none is learned",
)
