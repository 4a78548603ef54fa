"""What a benchmark prepares, in processes of their own: inputs, PyTorch's answers, the folder that baselines load."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hdexport.bench.baselines.baseline import MeasuredModel, checkpoint_folder
from hdexport.bench.measure.processes import ProcessOutcome, run_function
from hdexport.bench.results.result import RunStatus
from hdexport.bench.run import preparation
from hdexport.bench.run.plan import BenchOptions, plan
from hdexport.bench.run.preparation import (
    Preparation,
    Watcher,
    expected_path,
    inputs_path,
    write_expected,
    write_inputs,
)
from support.comparators import assert_close
from support.hugging_face import HuggingFace, extended_rows


def test_inputs_are_written_by_a_process(workshop: Any, tmp_path: Path) -> None:
    shapes = [(batch, tokens) for batch in (1, 3) for tokens in (1, 65)]
    outcome, _ = run_function(partial(write_inputs, workshop("bert").subject, tmp_path, shapes), time_limit_s=120)
    assert outcome.status is RunStatus.OK
    for batch, tokens in shapes:
        with np.load(inputs_path(tmp_path, batch, tokens)) as file:
            assert set(file.files) == {"input_ids", "attention_mask", "token_type_ids"}
            assert file["input_ids"].shape == (batch, tokens)


def test_a_known_error_is_its_message_and_leaves_nothing(tmp_path: Path, workshop: Any) -> None:
    subject = MeasuredModel(bundle=workshop("bert").subject.bundle, checkpoint="/nowhere/model")
    write_inputs(subject, tmp_path, [(1, 9)])
    before = set(tmp_path.iterdir())
    outcome, made = run_function(partial(write_expected, subject, tmp_path, [(1, 9)]), time_limit_s=120)
    assert (outcome.status, made) == (RunStatus.FAILED, None)
    assert (outcome.reason or "").startswith("There is no model directory '/nowhere/model'.\n")
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("model_type", ["bert", "longformer"])
def test_what_is_expected_is_hugging_faces_answer(workshop: Any, model_type: str) -> None:
    case = workshop(model_type)
    hugging_face = HuggingFace(Path(case.subject.checkpoint), "feature-extraction", max_len=300)
    for batch, tokens in [(1, 1), (3, 65), (3, 300)]:
        case.spec("torch", batch, tokens)
        with np.load(inputs_path(case.folder, batch, tokens)) as inputs:
            answer = hugging_face(**inputs)
        expected = {file.stem: np.load(file) for file in expected_path(case.folder, batch, tokens).iterdir()}
        assert set(expected) == set(answer)
        for name, values in answer.items():
            assert_close(expected[name], values, atol=1e-5)


def test_the_folder_that_baselines_load_has_the_bundles_positions(workshop: Any) -> None:
    case = workshop("bert")
    made = checkpoint_folder(case.subject, case.folder)
    name = "embeddings.position_embeddings.weight"
    table, source = (load_file(path / "model.safetensors")[name] for path in (made, Path(case.subject.checkpoint)))
    assert_close(table, extended_rows(source, 300).astype(np.float32), atol=1e-6)
    assert json.loads((made / "config.json").read_text())["max_position_embeddings"] == 300
    before = (made / "model.safetensors").stat().st_mtime_ns
    assert checkpoint_folder(case.subject, case.folder) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before


def outcome_of(status: RunStatus) -> ProcessOutcome:
    return ProcessOutcome(status=status, reason="no memory")


@pytest.mark.parametrize(("too_large", "processes"), [(None, 1), (9, 2)])
def test_a_shape_that_fails_takes_no_other_with_it(
    workshop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, too_large: int | None, processes: int
) -> None:
    subject = workshop("bert").subject
    made = Preparation(
        plan(BenchOptions(bundles=(subject.bundle,), lengths=(1, 9, 20), baselines=(), model=subject.checkpoint)),
        tmp_path / "prepared",
        Watcher(),
    )
    (tmp_path / "prepared").mkdir()
    began = []

    def write(path: Path, rows: Any, *, batch: int) -> None:
        if path.name == f"expected-1x{too_large}":
            raise MemoryError
        path.touch()

    def run_here(call: partial[Any], *, time_limit_s: float) -> tuple[ProcessOutcome, Any]:
        began.append(call.func is preparation.write_expected)
        try:
            return outcome_of(RunStatus.OK), call()
        except MemoryError:
            return outcome_of(RunStatus.OUT_OF_MEMORY), None

    monkeypatch.setattr(preparation, "write_rows", write)
    monkeypatch.setattr(preparation, "run_function", run_here)
    made.run()
    (series,) = (each for each in made._plan.series if each.is_available)
    there = [tokens for tokens in (1, 9, 20) if made.expected(series, 1, tokens)]
    assert there == [tokens for tokens in (1, 9, 20) if tokens != too_large]
    notes = [note for note in made.notes if "not compared with PyTorch" in note]
    assert notes == (
        [f"1 x {too_large} tokens were not compared with PyTorch, which failed: OOM: no memory"] if too_large else []
    )
    assert sum(began) == processes
