"""The largest batch in a memory budget: on simulated curves of memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from benchmarks.largest_batch import Found, Probe, bytes_from, largest_batch
from hdexport.bench.results.result import RunStatus
from hdruntime.errors import InputError

_BUDGET = 24 * 10**9


def test_amounts_of_memory_are_understood() -> None:
    expected = {
        "24GB": 24 * 10**9, "8GiB": 8 * 2**30, "1.5 gb": 15 * 10**8, " 640kB ": 640_000, ".5TiB": 2**39, "2e3": 2000,
    }  # fmt: skip
    assert {text: bytes_from(text) for text in expected} == expected


def test_other_text_is_refused_with_examples() -> None:
    for text in ("", "24G", "-1GB", "0.1", "nan", "1e999", "1_000"):
        with pytest.raises(InputError, match=r"is not an amount of memory\.\nWrite 24GB or 512MB") as refused:
            pytest.fail(f"{text!r} gives {bytes_from(text)}")
        assert repr(text) in str(refused.value)


class Machine:
    """A simulated memory; what it is asked is kept, and it refuses what was asked before.

    Args:
        memory: batch -> bytes.
        kills_above: more than that it ends, without a figure; None lets everything run.
        ends: batch -> how such a batch ends instead.
    """

    def __init__(
        self, memory: Callable[[int], float], *, kills_above: int | None = None, ends: dict[int, Probe] | None = None
    ) -> None:
        self.tried: list[int] = []
        self._memory, self._kills_above, self._ends = memory, kills_above, ends or {}

    def __call__(self, batch: int) -> Probe:
        assert batch >= 1
        assert batch not in self.tried
        self.tried.append(batch)
        if batch in self._ends:
            return self._ends[batch]
        peak_bytes = int(self._memory(batch))
        if self._kills_above is not None and peak_bytes > self._kills_above:
            return Probe(status=RunStatus.OUT_OF_MEMORY, reason="It was ended.")
        return Probe(status=RunStatus.OK, peak_bytes=peak_bytes)


_CURVES = {
    "linear": lambda batch: 1.2e9 + 0.83e9 * batch,
    "steps of two gigabytes": lambda batch: math.ceil((0.5e9 + 0.11e9 * batch) / 2e9) * 2e9,
    "doubling arena": lambda batch: 0.5e9 + 2 ** math.ceil(math.log2(0.05e9 * batch)),
    "quadratic": lambda batch: 1e9 + 2e6 * batch**2,
    "more for the first two": lambda batch: 4e9 if batch <= 2 else 0.2e9 * batch,
}


@pytest.mark.parametrize("curve", _CURVES)
def test_the_answer_was_seen_to_fit_and_its_successor_not(curve: str) -> None:
    """Whether or not a batch that does not fit lives to tell its figure."""
    memory = _CURVES[curve]
    truth = max(batch for batch in range(1, 5000) if memory(batch) <= _BUDGET)
    for kills_above in (None, _BUDGET):
        machine = Machine(memory, kills_above=kills_above)
        found = largest_batch(machine, budget_bytes=_BUDGET)
        assert found.is_limit, kills_above
        assert found.batch in machine.tried, kills_above
        assert found.peak_bytes == int(memory(found.batch)) <= _BUDGET, kills_above
        successor = min(batch for batch in machine.tried if batch > found.batch)
        assert memory(successor) > _BUDGET, kills_above
        assert successor - found.batch <= max(1, found.batch // 20), kills_above
        assert found.batch == truth if truth < 40 else 0.95 * truth <= found.batch <= truth, kills_above
        assert f"batch of {successor} " in found.reason, kills_above
        assert len(machine.tried) <= 13, kills_above


def test_a_single_text_that_does_not_fit_is_a_batch_of_zero() -> None:
    machine = Machine(lambda batch: 25e9 * batch)
    assert largest_batch(machine, budget_bytes=_BUDGET) == Found(0, None, True, "A batch of 1 takes 25 GB.")
    assert machine.tried == [1]
    killed = largest_batch(Machine(lambda batch: 25e9, kills_above=_BUDGET), budget_bytes=_BUDGET)
    assert killed == Found(0, None, True, "A batch of 1 does not fit: It was ended.")


@pytest.mark.parametrize(("status", "place"), [(RunStatus.FAILED, 0), (RunStatus.TIMEOUT, 3)])
def test_a_failure_ends_the_search_with_what_was_seen_to_fit(status: RunStatus, place: int) -> None:
    linear = _CURVES["linear"]
    undisturbed = Machine(linear)
    largest_batch(undisturbed, budget_bytes=_BUDGET)
    bad = undisturbed.tried[place]
    machine = Machine(linear, ends={bad: Probe(status=status, reason="no such kernel")})
    found = largest_batch(machine, budget_bytes=_BUDGET)
    fitting = [batch for batch in undisturbed.tried[:place] if linear(batch) <= _BUDGET]
    assert (found.batch, found.is_limit) == (max(fitting, default=0), False)
    assert found.reason == f"A batch of {bad} ended the search ({status.value}): no such kernel"
    assert machine.tried == undisturbed.tried[: place + 1]


def test_the_largest_batch_that_is_tried_is_not_a_limit() -> None:
    for most_texts in (1, 2, 37, 4096):
        machine = Machine(lambda batch: 1e9 + batch)
        found = largest_batch(machine, budget_bytes=_BUDGET, most_texts=most_texts)
        assert (found.batch, found.is_limit) == (most_texts, False)
        assert found.reason == f"{most_texts} is the largest batch that is tried."
        assert len(machine.tried) <= 7, most_texts


def test_the_time_limit_ends_the_search_before_the_next_try() -> None:
    seconds = iter(range(0, 1000, 10))
    machine = Machine(_CURVES["linear"])
    found = largest_batch(machine, budget_bytes=_BUDGET, time_limit_s=25, clock=lambda: next(seconds))
    assert (found.batch, found.is_limit, machine.tried) == (2, False, [1, 2])
    assert found.reason == "The search ended at its time limit, 25 s."
