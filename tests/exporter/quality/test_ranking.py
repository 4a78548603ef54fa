"""Ranks, MRR and intervals, computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hdexport.quality.ranking import Mean, mean_of, ranks_of, reciprocal_ranks


def test_the_rank_counts_from_the_most_similar_and_ties_earn_nothing() -> None:
    similarities = np.array([[0.9, 0.5, 0.1, 0.7], [0.9, 0.5, 0.1, 0.7], [0.5, 0.5, 0.5, 0.5]])
    assert ranks_of(similarities, [0, 1, 2]).tolist() == [1, 3, 4]
    # Another answer has another rank: a metric that ignores answers would not see the difference.
    assert ranks_of(similarities, [1, 0, 2]).tolist() == [3, 1, 4]


def test_mrr_is_that_computed_by_hand() -> None:
    ranks = np.array([1.0, 2.0, 3.0, 10.0, 11.0, np.inf])
    assert reciprocal_ranks(ranks).tolist() == pytest.approx([1, 1 / 2, 1 / 3, 1 / 10, 0, 0])


def test_an_interval_draws_documents_and_not_queries() -> None:
    scores = np.array([0.0, 0.0, 0.0, 1.0, 1.0, 1.0] * 10)
    apart = mean_of(scores, range(60))
    assert apart.value == 0.5
    assert apart.low == pytest.approx(0.37, abs=0.02)  # 0.5 - 1.96 * sqrt(0.25 / 60)
    assert apart.high == pytest.approx(0.63, abs=0.02)
    assert mean_of(scores, [0] * 60) == Mean(0.5, 0.5, 0.5)
    grouped = mean_of(scores, np.repeat(np.arange(20), 3).tolist())
    assert grouped.high - grouped.low > 1.5 * (apart.high - apart.low)


def test_an_interval_holds_its_mean_whatever_the_order_of_the_sum() -> None:
    """Thirteen equal scores of three documents: summed by document, their mean is a bit smaller than that of all."""
    answers = np.repeat([0, 1, 2], [4, 5, 4])
    found = mean_of(np.full(len(answers), 0.9), answers.tolist())
    assert found.low <= found.value <= found.high
