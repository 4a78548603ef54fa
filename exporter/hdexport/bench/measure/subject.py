"""The model that a benchmark is about: what PyTorch and the peers run, and what all answers are compared with."""

from __future__ import annotations

__all__ = ["Subject"]

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One PyTorch model; bundles of other precisions and backends may share it.

    Attributes:
        bundle: says which task, positions and attention the model has; of several the one that takes the longest texts.
        checkpoint: what the bundle was built from: a directory, or ``organisation/name`` on the Hugging Face hub; None
            where it is not here, so that there are inputs, and neither PyTorch's answers nor peers.
        allow_pickle: also read weights that are stored as a pickle.
    """

    bundle: Path
    checkpoint: str | None
    allow_pickle: bool = False
