"""Plans: the steps that run, the estimated seconds of each step, and the deadline after which no step starts."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.steps import STEPS, Step

_PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]

REQUIRES = tuple(
    line for lines in (_PROJECT["dependencies"], *map(_PROJECT["optional-dependencies"].get, ("export", "gpu")))
    for line in lines
)  # fmt: skip
"""Packages that hdexport needs to build bundles and to run them on a GPU."""

_STEP_BY_NAME = {step.name: step for step in STEPS}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Steps for the time that there is.

    Attributes:
        proves: what is known when it ended well.
        limit_s: seconds after which nothing runs. A step starts only if its estimate fits into what is left.
        steps: those that time nothing run first and side by side, then the others in their order.
        requires: packages that it needs on the GPU's machine, as pip has them.
        max_lines: of the summary; None has a line for every row.
        repeats: name of a plan; the steps of it that did not end well in the output's earlier rows follow.
    """

    proves: str
    limit_s: float
    steps: tuple[Step, ...]
    requires: tuple[str, ...] = REQUIRES
    max_lines: int | None = None
    repeats: str | None = None

    @property
    def estimate_s(self) -> float:
        """Seconds that all steps take: the longest one that times nothing, and the sum of the others."""
        checks = max((step.estimate_s for step in self.steps if not step.is_timed), default=0.0)
        return checks + sum(step.estimate_s for step in self.steps if step.is_timed)


def step(name: str, estimate_s: float, budget_s: float | None = None, **options: Any) -> Step:
    """A step of `STEPS` with an estimate and options of its own.

    Args:
        budget_s: seconds after which it is ended; None for the step's own.
    """
    found = _STEP_BY_NAME[name]
    merged: Mapping[str, Any] = {**found.options, **options}
    return dataclasses.replace(found, estimate_s=estimate_s, budget_s=budget_s or found.budget_s, options=merged)
