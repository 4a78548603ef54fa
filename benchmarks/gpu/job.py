"""What the process of a step is given, and how it reports what it found."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import append, now


class SkippedError(Exception):
    """The step cannot run here, for a reason that is not a fault: a package or a file is missing."""


class StepFailedError(Exception):
    """The step ran and found something wrong."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One step's task.

    Attributes:
        step: its name.
        output: JSON lines are appended to it; None keeps nothing.
        rehearsal: run on the CPU, with tiny shapes; rows are marked as such.
        trial: run on the GPU, each call a few times, which proves the code and fills the compilers' caches; rows are
            marked as such.
        bundle: a bundle to run instead of one that the step builds itself; None for none.
    """

    step: str
    output: Path | None
    rehearsal: bool
    trial: bool = False
    bundle: Path | None = None

    @property
    def device(self) -> str:
        """``cuda``, or ``cpu`` in a rehearsal."""
        return "cpu" if self.rehearsal else "cuda"

    @property
    def times_nothing(self) -> bool:
        """Whether the times in the rows mean nothing."""
        return self.rehearsal or self.trial

    @property
    def folder(self) -> Path:
        """Where bundles and texts are that later steps use: beside the output."""
        found = (Path(tempfile.gettempdir()) if self.output is None else self.output.absolute().parent) / "bundles"
        found.mkdir(parents=True, exist_ok=True)
        return found

    def least_s(self, seconds: float) -> float:
        """How long a call is repeated: as long as asked, or once or thrice where times mean nothing."""
        return 0.0 if self.times_nothing else seconds

    def write(self, **row: Any) -> None:
        """Append a row at once: what comes later may end this process."""
        about = {"benchmark": "gpu_suite", "step": self.step, "rehearsal": self.rehearsal, "trial": self.trial}
        about |= {"date": now()}
        append(self.output, about | row)
