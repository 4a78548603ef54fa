"""The cases of a grid that every run tries."""

from __future__ import annotations

from typing import Any

import pytest

from hdexport.families import SUPPORTED_MODEL_TYPES

EVERY_RUN_TYPES = tuple(
    name
    for name in SUPPORTED_MODEL_TYPES
    if name
    not in (
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "luke",
        "megatron-bert",
        "mt5",
        "nomic_bert",
        "rembert",
        "xlm-roberta",
        "xlm-roberta-xl",
    )
)
"""Model types whose bundles every run builds.

The layers of the others are another type's of their family: every run tries their trace, in PyTorch.
"""

TASKS_OF_EVERY_RUN = {
    "bert": (
        "feature-extraction",
        "sentence-similarity",
        "fill-mask",
        "text-classification",
        "token-classification",
        "question-answering",
    ),
    "roberta": ("feature-extraction", "text-classification"),
}
"""Model type -> tasks whose bundles every run builds: each task, and one whose head either family writes in its way.

The library's heads on an encoder do not depend on ours; test_big_bird.py has the sparse encoders.
"""


def nightly_unless(every_run: bool, *values: Any) -> Any:
    """A case that every run tries, or one that repeats the claim of those and waits for `make test-all`."""
    return pytest.param(*values, marks=() if every_run else pytest.mark.nightly)
