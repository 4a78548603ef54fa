"""What tests of benchmarks share: a benchmark of a CPU, run as a whole in one process."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.cpu import targets
from hdexport.bench.measure.processes import ProcessOutcome, run_process
from hdexport.bench.results.result import RunStatus
from support.bench_workshop import shallow, workshop  # noqa: F401 fixtures
from tests.exporter.conftest import tiny_bundles  # noqa: F401 fixture


@pytest.fixture
def rehearse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[[ModuleType, str], Any]:
    """From a script and its options: its result and what it prints, verdicts and exit status checked against ratios.

    Its own child processes run in this one, which has PyTorch loaded; their memory says nothing about a case.
    """

    def run(script: ModuleType, options: str) -> Any:
        def run_here(arguments: list[str], **limits: Any) -> ProcessOutcome:
            if arguments[:2] != ["-m", script.__name__]:
                return run_process(arguments, **limits)
            printed = io.StringIO()
            with monkeypatch.context() as child, redirect_stdout(printed):
                child.setattr(sys, "argv", arguments[1:])
                assert script.main() == 0
            found = json.loads(printed.getvalue().splitlines()[-1])
            return ProcessOutcome(status=RunStatus.OK, output=found)

        results = tmp_path / "results.jsonl"
        command = [script.__name__, *options.split(), "--rounds", "1", "--output", str(results)]
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.setattr(targets, "run_process", run_here)
        monkeypatch.setattr(targets, "with_growth", lambda call: (call(), 2))
        status = script.main()
        # A test may rehearse several scripts.
        *_, result = map(json.loads, results.read_text().splitlines())
        printed = capsys.readouterr()
        missed = sum(ratio["median"] > ratio["target"] for ratio in result["ratios"])
        assert status == (missed > 0)
        assert (printed.out.count(": MISSED"), printed.out.count(": met")) == (missed, len(result["ratios"]) - missed)
        assert all(figures["latency_ms"] > 0 and figures["cpu_ms"] > 0 for figures in result["cases"].values())
        assert set(result["versions"]) == {"hdexport", "torch", "transformers", "onnxruntime", "openvino", "nncf"}
        return result, printed

    return run


@pytest.fixture
def tiny_sentence_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A BERT that sentence-transformers reads too, in the place of the sample model."""
    import hdexport.checkpoint
    from hdruntime.bundle.manifest import Task
    from support.tiny_models import save_sentence_modules, save_tiny_model

    directory = tmp_path / "tiny"
    save_tiny_model(directory, "bert", Task.FEATURE_EXTRACTION)
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    save_sentence_modules(directory, "Normalize", pooling=pooling)
    monkeypatch.setattr(hdexport.checkpoint, "default_model", lambda: (directory, "a tiny model"))
    return directory
