"""The plans of the GPU suite: what they run, when nothing starts any more, what is repeated, and the summary."""

from __future__ import annotations

import inspect
import json
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import suite
from benchmarks.gpu.cases import FAMILIES
from benchmarks.gpu.plans import PLANS
from benchmarks.gpu.plans.plan import Plan
from benchmarks.gpu.steps import STEPS, Step
from benchmarks.gpu.table import verdicts_of

SHORT_PLANS = [name for name, plan in PLANS.items() if plan.max_lines is not None]

_FAKE_STEPS = """
import json, sys, time
step, output, plan = sys.argv[2], open(sys.argv[4], "a"), sys.argv[6]
print(json.dumps({"step": step, "rehearsal": False, "case": "a row", "plan": plan}), file=output, flush=True)
if step == "endless":
    time.sleep(60)
print(json.dumps({"status": "failed", "reason": "wrong"} if step == "wrong" and plan == "first" else {"status": "ok"}))
"""


def _step(name: str, estimate_s: float, budget_s: float = 60.0) -> Step:
    return Step(name, budget_s, f"{name} is proved", "", estimate_s=estimate_s)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a plan of fake steps; the rows are in `rows.jsonl`."""
    script = tmp_path / "fake.py"
    script.write_text(_FAKE_STEPS)
    monkeypatch.setattr(suite, "why_no_gpu", lambda: None)

    def run(*arguments: str, **plans: Plan) -> int:
        for name, plan in plans.items():
            monkeypatch.setitem(suite.PLANS, name, plan)
        monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--output", str(tmp_path / "rows.jsonl"), *arguments])
        return suite.main("A suite.", [str(script)])

    return run


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_plans_are_found_and_their_steps_are_run_with_options_that_their_functions_have() -> None:
    assert {"all", "first", "second"} <= PLANS.keys()
    known = {step.name for step in STEPS}
    for plan in PLANS.values():
        assert {step.name for step in plan.steps} <= known
        for step in plan.steps:
            function = pkgutil.resolve_name(f"benchmarks.gpu.{step.does}")
            inspect.signature(function).bind(None, **step.options)
    assert set(FAMILIES) == {step.options["family"] for step in STEPS if step.does == "kernels:check"}


@pytest.mark.parametrize("name", SHORT_PLANS)
def test_a_short_plan_fits_its_limit_by_estimates_and_one_call_of_ten_minutes(name: str) -> None:
    plan = PLANS[name]
    # A step that starts last with its estimate alone is ended at the limit, and the summary is printed then.
    assert plan.estimate_s <= plan.limit_s <= 10 * 60 - 60
    assert all(step.estimate_s <= step.budget_s for step in plan.steps)
    assert plan.max_lines == 60


def test_both_short_plans_together_take_twelve_minutes() -> None:
    assert sum(PLANS[name].limit_s for name in SHORT_PLANS) <= 12 * 60


def test_a_step_that_takes_longer_than_what_is_left_does_not_start_and_a_shorter_one_does(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = (_step("long", 1000.0), _step("short", 1.0))
    assert run("--plan", "first", first=Plan(proves="", limit_s=100, steps=steps, max_lines=60)) == 0
    ends = {row["step"]: row["status"] for row in rows_in(tmp_path) if row["case"] == "step"}
    assert ends == {"long": "not started", "short": "ok"}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split(maxsplit=1)[0] == "long"
    assert "not started it takes 1000 s, and 1" in lines[0]
    assert lines[1].split(maxsplit=2) == ["short", "ok", "short is proved"]


def test_the_second_plan_repeats_what_did_not_end_well_in_the_first(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = (_step("right", 1.0), _step("wrong", 1.0), _step("endless", 0.5, budget_s=1.0), _step("late", 1000.0))
    first = Plan(proves="", limit_s=100, steps=steps)
    second = Plan(proves="", limit_s=100, steps=(_step("own", 1.0),), repeats="first")
    assert run("--plan", "first", first=first, second=second) == 1
    capsys.readouterr()
    assert run("--plan", "second") == 1
    repeated = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert repeated == ["own", "wrong", "endless", "late"]
    in_second = [row["step"] for row in rows_in(tmp_path) if row["case"] == "a row" and row["plan"] == "second"]
    assert in_second == ["own", "wrong", "endless"]
    # What was repeated well is not repeated again.
    assert run("--plan", "second", "--minutes", "0") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["own", "endless", "late"]


def test_a_plan_whose_first_part_has_not_run_repeats_nothing(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    first = Plan(proves="", limit_s=100, steps=(_step("wrong", 1.0),))
    second = Plan(proves="", limit_s=100, steps=(_step("own", 1.0),), repeats="first")
    assert run("--plan", "second", first=first, second=second) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["own"]


def test_a_step_that_the_plan_does_not_have_is_refused_with_those_that_it_has(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("--plan", "second", "--steps", "engine-tensorrt")
    assert "the plan second has no step engine-tensorrt; it has machine, " in capsys.readouterr().err


def _kernel_row(case: str, head_dim: int, median_ms: float) -> dict[str, Any]:
    times = {"median_ms": median_ms, "p20_ms": median_ms, "p80_ms": median_ms, "roofline_ms": 0.1, "tflops": 300.0}
    return {
        "case": case, "head_dim": head_dim, "batch": 16, "tokens": 4096, "step": "kernels-d64", "rehearsal": False,
        **times,
    }  # fmt: skip


def test_goals_and_ends_take_the_place_of_measurements_where_lines_are_few() -> None:
    rows = [_kernel_row("our candidate in Gluon, window", 64, 0.5), _kernel_row("FlashAttention 4 window", 64, 0.6)]
    ends = [("kernels-d64", "failed", "wrong")]
    whole = suite.summary_of([*rows, *rows * 50], ends, {})
    assert len(whole) == 102 + 2
    few = suite.summary_of([*rows, *rows * 50], ends, {}, max_lines=60)
    assert len(few) == 60
    assert few[:57] == whole[:57]
    assert few[57] == "... and 45 more measurements, whose rows are in the output"
    assert few[58:] == whole[-2:]
    assert few[-1].split() == ["kernels-d64", "failed", "wrong"]
    assert suite.summary_of(rows, ends, {}, max_lines=60) == suite.summary_of(rows, ends, {})


@pytest.mark.parametrize(
    ("head_dim", "found_ms", "verdict"), [(64, 0.6, "met"), (64, 0.7, "MISSED"), (128, 0.65, "met")]
)
def test_the_candidate_is_held_to_flash_attention_4(head_dim: int, found_ms: float, verdict: str) -> None:
    ours = "our candidate in Gluon, window"
    rows = [_kernel_row(ours, head_dim, found_ms), _kernel_row("FlashAttention 4 window", head_dim, 0.6)]
    (line,) = verdicts_of(rows)
    assert line.startswith(f"{ours} at d{head_dim}: ")
    assert line.endswith(verdict)


@pytest.mark.parametrize(
    ("gpu", "p50_ms", "ends"), [("H100", 17.1, ["met"]), ("H200", 17.2, ["MISSED"]), ("A100", 1, [])]
)
def test_a_model_by_our_kernel_is_held_to_flex_attention_on_hopper(gpu: str, p50_ms: float, ends: list[str]) -> None:
    row = {
        "case": "graph", "model": "bert-base", "variant": "our kernel, window", "batch": 8, "tokens": 4096,
        "status": "ok", "p50_ms": p50_ms, "rehearsal": False, "step": "bert-our-kernel",
    }  # fmt: skip
    found = list(verdicts_of([row, {"gpu": f"NVIDIA {gpu}", "rehearsal": False}]))
    assert [line.split()[-1] for line in found] == ends


@pytest.mark.parametrize(("seconds", "verdict"), [(2.9, "met"), (3.0, "MISSED")])
def test_passages_per_second_are_of_68_tokens(seconds: float, verdict: str) -> None:
    row = {
        "case": "corpus", "corpus": "passages", "title": "ours", "texts": 100_000, "tokens": 6_900_000,
        "seconds": [seconds], "is_baseline": False, "gpu_busy_share": [0.5], "rehearsal": False,
    }  # fmt: skip
    found = list(verdicts_of([row, {"gpu": "NVIDIA H100", "rehearsal": False}]))
    assert found == [f"{6_900_000 / 68 / seconds:,.0f} passages/s of 68 tokens, target 34,638: {verdict}"]
