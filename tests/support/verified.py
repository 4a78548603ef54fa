"""The verification of a fixture's bundle, or of a changed copy, against the checkpoint that the bundle was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hdexport.checkpoint import find_checkpoint
from hdexport.support.progress import Progress
from hdexport.verify import Check, Grid, Verification, verify_bundle
from hdexport.verify.pytorch_reference import reference_of
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.verification import Skip


class Recorder(Progress):
    """Records the outcomes that a verification reports."""

    def __init__(self) -> None:
        self.outcomes: list[Check | Skip] = []

    def check(self, outcome: Check | Skip) -> None:
        self.outcomes.append(outcome)


def verified(bundle: Any, path: Path | None = None, *, grid: Grid = Grid.QUICK) -> Verification:
    """Verify a bundle.

    Args:
        bundle: of a fixture, with its checkpoint.
        path: of a copy of it that was changed; None for the bundle itself.
        grid: the lengths and batches.
    """
    reference = reference_of(open_bundle(bundle.path), find_checkpoint(bundle.checkpoint))
    return verify_bundle(open_bundle(path or bundle.path), reference, grid=grid)
