"""The benchmark of the runtime: a tiny run of the whole script, and verdicts that can be bad."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hdexport.bench.measure.processes import Outcome, run_process
from hdexport.bench.results.result import Status

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_are_importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("targets", "runtime_overhead"):
        sys.modules.pop(name, None)


@pytest.fixture
def script() -> ModuleType:
    import runtime_overhead

    return runtime_overhead


@pytest.fixture
def tiny_sentence_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the sample model."""
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    import hdexport.checkpoint
    from hdexport.model.tasks import Task
    from support.tiny_models import save_sentence_modules, save_tiny_model

    directory = tmp_path / "tiny"
    save_tiny_model(directory, "bert", Task.FEATURE_EXTRACTION)
    save_sentence_modules(
        directory, "Normalize", pooling={"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    )
    monkeypatch.setattr(hdexport.checkpoint, "default_model", lambda: (directory, "a tiny model"))


@pytest.mark.nightly
def test_the_script_measures_every_case(
    script: ModuleType,
    tiny_sentence_model: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Its own child processes run in this one, which has PyTorch loaded; their memory says nothing about a case."""
    import targets

    def run_here(arguments: list[str], **options: Any) -> Outcome:
        if arguments[0] != script.__file__:
            return run_process(arguments, **options)
        printed = io.StringIO()
        with monkeypatch.context() as child, redirect_stdout(printed):
            child.setattr(sys, "argv", arguments)
            assert script.main() == 0
        output = json.loads(printed.getvalue().splitlines()[-1])
        return Outcome(status=Status.OK, output=output, reason=None, peak_rss_bytes=0)

    results = tmp_path / "results.jsonl"
    command = "runtime_overhead.py --texts 40 --longest 60 --positions 1030 --threads 1 --rounds 1 --output"
    monkeypatch.setattr(sys, "argv", [*command.split(), str(results)])
    monkeypatch.setattr(targets, "run_process", run_here)
    monkeypatch.setattr(script, "_CALL_TOKENS", 512)
    monkeypatch.setattr(script, "with_growth", lambda call: (call(), 2))
    status = script.main()
    (result,) = map(json.loads, results.read_text().splitlines())
    assert set(result["cases"]) == set(script.CASES)
    assert all(figures["latency_ms"] > 0 and figures["cpu_ms"] > 0 for figures in result["cases"].values())
    assert result["cases"]["load"]["growth_bytes"] > 1e6
    chosen = result["sentence_transformers"]
    assert chosen["batch_size"] in script._BATCH_SIZES
    assert set(chosen["batch_size_latency_ms"]) == {str(size) for size in script._BATCH_SIZES}
    missed = sum(ratio["median"] > ratio["target"] for ratio in result["ratios"])
    printed = capsys.readouterr().out
    assert len(result["ratios"]) == 4
    assert printed.count(": MISSED") == missed
    assert printed.count(": met") == 4 - missed
    assert status == (missed > 0)


def test_texts_are_real_and_of_all_lengths(script: ModuleType, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = script.mixed_texts(tmp_path / "tokenizer.json", number=300, longest=2000)
    tokens = np.array([len(each.ids) for each in tokenizer.encode_batch(texts)]) + 2
    assert len(set(texts)) > 290
    assert 20 <= tokens.min() < 25
    assert 1900 < tokens.max() < 2000
    assert 150 < np.median(tokens) < 270  # Half of a logarithmic scale from 20 to 2000 is 200.


def call_of(seconds: float, value: float = 1.0) -> Callable[[], dict[str, np.ndarray]]:
    def call() -> dict[str, np.ndarray]:
        time.sleep(seconds)
        return {"vector": np.full(3, value, np.float32)}

    return call


@pytest.fixture
def only_sleep_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.append(now.pop() + seconds))


@pytest.mark.usefixtures("only_sleep_takes_time")
def test_an_overhead_is_how_many_times_as_long_a_call_takes(script: ModuleType) -> None:
    measured = script._taking_turns(call_of(0.03), call_of(0.02), times=5)
    assert measured["overhead"] == pytest.approx(1.5)
    assert measured["latency_ms"] == pytest.approx(30)


@pytest.mark.parametrize("value", [1 + 2**-20, float("nan")])
def test_a_call_that_answers_otherwise_is_not_measured(script: ModuleType, value: float) -> None:
    with pytest.raises(SystemExit, match="not that of the bare call"):
        script._taking_turns(call_of(0, value), call_of(0), times=1)


@pytest.mark.usefixtures("only_sleep_takes_time")
def test_the_fastest_batch_size_is_chosen(script: ModuleType) -> None:
    seen: list[str] = []

    def encode(texts: list[str], size: int) -> None:
        seen.extend(texts)
        time.sleep(0.001 if size == 4 else 0.02)

    texts = ["x" * length for length in range(400)]
    assert script._fastest_batch_size(encode, texts)["batch_size"] == 4
    assert len(set(seen)) == 3 * 32


@pytest.mark.parametrize(("at_most", "status", "verdict"), [(250.0, 0, "met"), (249.0, 1, "MISSED")])
def test_a_figure_can_be_a_target_by_itself(
    at_most: float, status: int, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import targets

    fake = tmp_path / "fake.py"
    fake.write_text('print(\'{"latency_ms": 250.0, "cpu_ms": 1.0, "growth_bytes": 1}\')')
    target = targets.Target("load", None, targets.Figure.LATENCY, at_most)
    result = targets.compare(str(fake), ["load"], [target], rounds=2, arguments=[], same_answers={})
    assert result["cases"]["load"] == {"latency_ms": 250.0, "cpu_ms": 1.0, "growth_bytes": 1}
    assert targets.report(result, None) == status
    assert f"  load, latency: 250.000 (250.000 to 250.000), target {at_most:g}: {verdict}" in capsys.readouterr().out
