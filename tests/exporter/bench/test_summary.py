"""The headline says what a benchmark found, good or bad, and nothing that it did not find."""

from __future__ import annotations

import dataclasses

import pytest

from hdexport.bench.results.formatting import outputs_text
from hdexport.bench.results.result import BenchResult, CaseResult, CaseState, ModelChange, OutputError
from hdexport.bench.results.summary import NoteKind, caution, headline, notes
from support.sample_results import (
    COMPILED,
    OPTIMUM,
    OURS,
    PLAIN,
    SENTENCE,
    TORCH,
    sample_result,
    slower,
    with_cases,
    without_change,
)


def with_only(*names: str, noise: float = 0.0) -> BenchResult:
    """Those series of a result, in one batch size, at 512 and 1024 tokens."""
    result = sample_result(lengths=(512, 1024), noise=noise)
    return dataclasses.replace(
        result,
        series=tuple(series for series in result.series if series.name in names),
        cases=tuple(case for case in result.cases if case.series in names and case.batch == 1),
    )


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (with_only(OURS, COMPILED), "2.7 times as fast as torch.compile at 1024 tokens, with 0.35 of its memory"),
        (with_only(OURS, SENTENCE), "159 ms for 1024 tokens, with 369 MB of memory"),
        # Optimum is wrong at 1024 tokens: a fast wrong answer does not count.
        (with_only(OURS, OPTIMUM), "2.4 times as fast as Optimum at 512 tokens, with 0.53 of its memory"),
        (
            without_change(with_only(OURS, TORCH), ModelChange.ATTENTION, TORCH),
            "4.0 times as fast as PyTorch without the change of attention at 1024 tokens, with 0.43 of its memory",
        ),
        (
            slower(with_only(OURS, TORCH), 10, OURS),
            "Takes 2.5 times as long as PyTorch at 1024 tokens, with 0.43 of its memory",
        ),
        (
            slower(with_only(OURS, TORCH), 10, OURS, lengths=(512,)),
            "4.0 times as fast as PyTorch at 1024 tokens, with 0.43 of its memory; slower at 512 tokens",
        ),
        (
            slower(with_only(OURS, TORCH, noise=0.05), 4.05, OURS),
            "About as fast as PyTorch at 1024 tokens, with 0.43 of its memory",
        ),
    ],
)
def test_the_headline_is_the_finding(result: BenchResult, expected: str) -> None:
    assert headline(result) == expected


def test_of_several_bundles_the_headline_names_the_one_that_it_is_about() -> None:
    result = with_only(OURS, PLAIN, TORCH)
    series = tuple(dataclasses.replace(each, is_baseline=each.name == TORCH) for each in result.series)
    assert headline(dataclasses.replace(result, series=series)).startswith(f"{OURS}: 4.0 times as fast as PyTorch")


def test_wrong_outputs_are_the_headline_whatever_their_speed() -> None:
    result = with_only(OURS, TORCH)

    def wrong(case: CaseResult) -> CaseResult:
        is_wrong = (case.series, case.tokens) == (OURS, 512)
        return dataclasses.replace(
            case, error=OutputError(max_abs_error=0.4, min_cosine=0.5, passed=not is_wrong, tolerance="any")
        )

    assert headline(with_cases(result, wrong)) == "Wrong outputs at 512 tokens"


@pytest.mark.parametrize(("rounds", "said"), [(2, "Only 2 rounds were measured: "), (3, None)])
def test_few_rounds_get_a_caution(rounds: int, said: str | None) -> None:
    found = caution(sample_result(rounds=rounds))
    assert (found is None) == (said is None)
    assert (found or "").startswith(said or "")


def test_a_model_without_a_requested_change_differs_and_is_not_wrong() -> None:
    result = without_change(with_only(OURS, TORCH), ModelChange.ATTENTION, TORCH)
    case = result.case(TORCH, 1, 1024)
    assert case is not None
    assert case.state is CaseState.DIFFERS
    text = "outputs differ by the requested change of attention: max abs error 0.35, min cosine 0.81"
    assert outputs_text(case) == text
    (note,) = [note for note in notes(result) if note.kind in (NoteKind.DIFFERS, NoteKind.WRONG)]
    assert note == (NoteKind.DIFFERS, TORCH, f"{text} (batch 1 with 512, 1024 tokens)")


def test_outputs_within_the_tolerance_are_right_whatever_the_baseline_lacks() -> None:
    result = without_change(with_only(OURS, TORCH), ModelChange.ATTENTION, TORCH)
    right = with_cases(
        result,
        lambda case: dataclasses.replace(case, error=case.error and dataclasses.replace(case.error, passed=True)),
    )
    assert {case.state for case in right.cases} == {CaseState.OK}
