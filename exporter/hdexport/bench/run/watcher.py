"""Progress of a benchmark, which the command line shows."""

from __future__ import annotations

from collections.abc import Sequence

from hdexport.bench.results.result import CaseResult


class Watcher:
    """Silent; the base of classes that show something."""

    def step(self, title: str) -> None:
        """A step of the preparation begins."""

    def note(self, text: str) -> None:
        """A note of the result."""

    def planned(self, cases: Sequence[tuple[str, int, int]], rounds: int) -> None:
        """The rounds begin; each case is the name of its series, batch and tokens."""

    def begin(self, series: str, batch: int, tokens: int, number: int) -> None:
        """Round `number`, from 1, of a case begins."""

    def finish(self, case: CaseResult) -> None:
        """A round of a case ended; `case` is its result so far."""
