"""Progress of a benchmark: the library calls, the command line shows."""

from __future__ import annotations

from collections.abc import Sequence

from hdexport.bench.results.result import CaseResult


class Watcher:
    """Silent; the base of classes that show something."""

    def step(self, title: str) -> None:
        """Something is prepared."""

    def note(self, text: str) -> None:
        """A line that belongs to the result."""

    def planned(self, cases: Sequence[tuple[str, int, int]], rounds: int) -> None:
        """The cases begin, a round of each after the other: name of the series, batch and tokens of each."""

    def begin(self, series: str, batch: int, tokens: int, number: int) -> None:
        """Round `number`, from 1, of a case begins."""

    def finish(self, case: CaseResult) -> None:
        """A round of a case ended; the result of the case so far."""
