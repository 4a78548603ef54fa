"""Mean reciprocal rank, and intervals of means that draw whole documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hdruntime.arrays import FloatingArray

CUTOFF = 10
"""Documents of a ranking that count."""

_RESAMPLES = 10_000
_RESAMPLES_AT_ONCE = 1000


@dataclass(frozen=True)
class Mean:
    """A mean and its bootstrap interval of 95 %."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def ranks_of(similarities: FloatingArray, answers: Sequence[int]) -> FloatingArray:
    """[queries], from 1: the rank of each right document in similarities [queries, documents]; of equal ones it is the
    last, so that ties earn nothing."""
    own = similarities[np.arange(len(answers)), list(answers)]
    return (similarities >= own[:, None]).sum(axis=1).astype(float)


def reciprocal_ranks(ranks: FloatingArray) -> FloatingArray:
    """1 / rank, 0 after the cutoff; their mean is MRR@10."""
    return np.where(ranks <= CUTOFF, 1 / ranks, 0.0)


def mean_of(scores: FloatingArray, answers: Sequence[int]) -> Mean:
    """A mean over scores of queries, [queries], and its interval from drawing documents, because queries of one
    document are alike. Differences of two variants' scores give a paired interval."""
    _, members = np.unique(answers, return_inverse=True)
    sums, counts = np.bincount(members, scores), np.bincount(members)
    random = np.random.default_rng(0)
    means = []
    for _ in range(_RESAMPLES // _RESAMPLES_AT_ONCE):
        drawn = random.integers(0, len(sums), (_RESAMPLES_AT_ONCE, len(sums)))
        means.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    mean = float(scores.mean())
    # Documents that score alike have one mean, summed in several orders, so rounding may move a bound past it.
    return Mean(mean, min(float(low), mean), max(float(high), mean))
