"""Results of `benchmarks.quality.retrieval`: ranks of every query, read back for tables and pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hdexport.quality.measurement import Mean, mean_of, reciprocal_ranks

BASELINE = "truncated"
PRECISIONS_RUNNER = "openvino"
"""The runner that has variants in other precisions than float32, and none with other positions."""

TITLES = {"python": "Python's help", "debian": "Debian's documentation"}
"""Titles of the corpora."""


@dataclass(frozen=True)
class Facts:
    """Facts that results must share to be compared.

    Attributes:
        corpus: its name.
        digest: of its documents and queries.
        model: its name.
        max_len: tokens of the extended bundles.
        runner: that computed them.
    """

    corpus: str
    digest: str
    model: str
    max_len: int
    runner: str


@dataclass(frozen=True)
class Line:
    """The result of a variant.

    Attributes:
        facts: see there.
        variant: its name.
        build: how it is built and read.
        ranks: kind -> of each document that is asked for, the ranks of its queries; 0 after the tenth.
        about: the whole line.
    """

    facts: Facts
    variant: str
    build: Mapping[str, Any]
    ranks: Mapping[str, Sequence[Sequence[int]]]
    about: Mapping[str, Any]

    @staticmethod
    def of(line: Mapping[str, Any]) -> Line:
        """Read a line of the file."""
        return Line(Facts(**line["facts"]), line["variant"], line["build"], line["ranks"], line)

    @property
    def precision(self) -> str:
        """Precision of the session."""
        return str(self.build.get("precision", "float32"))  # results of earlier days say nothing

    @property
    def is_of_precisions(self) -> bool:
        """Whether the line is about precisions, and not about positions."""
        return self.facts.runner == PRECISIONS_RUNNER

    def mrr(self, kind: str) -> Mean:
        """MRR@10 of a kind of query."""
        return mean_of(self._scores(kind), self._documents(kind))

    def difference(self, other: Line, kind: str) -> Mean:
        """MRR@10 less another variant's, paired by query.

        Raises:
            ValueError: the other's documents and queries differ.
        """
        if other.facts != self.facts:
            raise ValueError(f"{self.variant} and {other.variant} were measured on different queries")
        return mean_of(self._scores(kind) - other._scores(kind), self._documents(kind))

    def summary(self) -> str:
        """One line for the terminal."""
        return f"{self.facts.corpus}, {self.variant}: " + ", ".join(f"{k} {self.mrr(k).value:.3f}" for k in self.ranks)

    def _scores(self, kind: str) -> npt.NDArray[np.floating[Any]]:
        ranks = np.array([rank for document in self.ranks[kind] for rank in document], float)
        return reciprocal_ranks(np.where(ranks == 0, np.inf, ranks))

    def _documents(self, kind: str) -> list[int]:
        return [number for number, document in enumerate(self.ranks[kind]) for _ in document]


def read_lines(file: Path) -> list[Line]:
    """The results in a file, none if there is no file; of a variant that occurs twice, the last."""
    if not file.exists():
        return []
    lines = [Line.of(json.loads(text)) for text in file.read_text(encoding="utf-8").splitlines()]
    return list({(line.facts, line.variant): line for line in lines}.values())
