"""A corpus: a bundle and sentence-transformers embed the same texts, and their figures can be believed."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks.corpus import bench, encode_script
from benchmarks.corpus.__main__ import main
from benchmarks.corpus.baselines import python_of_optimum
from benchmarks.corpus.bench import (
    SAMPLES,
    CorpusBench,
    CorpusResult,
    CorpusSeries,
    largest_difference,
    texts_of,
    write_corpus_result,
)
from hdexport.bench.measure.processes import ProcessOutcome, run_process
from hdexport.bench.results.result import RunStatus
from hdexport.bench.run.plan import BenchOptions
from hdruntime.bundle.checked_json import from_json
from hdruntime.errors import InputError

ROOT = Path(__file__).parents[2]
Command = Callable[..., subprocess.CompletedProcess[str]]
TEXTS = [" ".join(f"w{(number * 7 + word) % 40 + 1}" for word in range(number % 9 + 1)) for number in range(24)]
OURS, BASELINE, FASTEMBED = "bundle (onnxruntime)", "sentence-transformers, PyTorch, float32", "fastembed, float32"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return path


def run_here(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in this process, where all that it imports is there."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(list(map(str, arguments)))
    return subprocess.CompletedProcess(arguments, code, printed.getvalue(), "")


def run_from_checkout(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a user starts it, with these variables in its environment."""
    path = os.pathsep.join(filter(None, [environment.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.corpus", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path} | environment,
    )


def measured(
    command: Callable[..., subprocess.CompletedProcess[str]],
    bundle: Any,
    corpus: Path,
    folder: Path,
    sizes: str,
    **variables: str,
) -> tuple[CorpusResult, list[str]]:
    """The figures, and the printed lines, of the command."""
    options = ["--batch", sizes, "--rounds", "1", "--backends", "onnxruntime", "--precision", "auto"]
    options += ["--threads", "1", "--model", bundle.checkpoint, "-o", folder / "out"]
    done = command(bundle.path, "--corpus", corpus, *options, **variables)
    assert done.returncode == 0, done.stderr
    return from_json(
        (folder / "out" / "corpus.json").read_text(), CorpusResult, name="corpus"
    ), done.stdout.splitlines()


def run_first_of_each(
    arguments: Sequence[str], *, python: str | None, time_limit_s: float, begun: set[str]
) -> ProcessOutcome:
    """The first run of each script in a process of its own, and the others in this one, which then has PyTorch."""
    script, request = arguments
    if script not in begun:
        begun.add(script)
        return run_process(arguments, python=python, time_limit_s=time_limit_s)
    assert (script, python) == (encode_script.__file__, None)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        encode_script.main(request)
    memory = psutil.Process().memory_info().rss
    return ProcessOutcome(status=RunStatus.OK, output=json.loads(printed.getvalue()), peak_rss_bytes=memory)


@pytest.fixture(scope="module")
def run(tiny_bundles: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[CorpusResult, list[str]]:
    bundle, folder = tiny_bundles("bert", "sentence-similarity"), tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/usr/bin:/bin")
        patch.setattr(bench, "run_process", functools.partial(run_first_of_each, begun=set()))
        return measured(run_here, bundle, corpus, folder, "2")


def test_the_file_names_no_path_of_the_machine(tmp_path: Path) -> None:
    result = CorpusResult(
        date="2026-11-27T09:51:00+00:00", command="python -m benchmarks.corpus b4 --corpus texts.jsonl", environment={},
        corpus="/data/of/somebody/texts.jsonl", texts=1, lengths=(1, 1, 1), rounds=1,
        series=(CorpusSeries(name=BASELINE, is_baseline=True, unavailable="No module at /opt/venv/lib"),),
    )  # fmt: skip
    write_corpus_result(tmp_path, result)
    found = from_json((tmp_path / "corpus.json").read_text(), CorpusResult, name="corpus")
    assert (found.corpus, found.series[0].unavailable, found.texts) == ("texts.jsonl", "No module at lib", 1)


def test_every_way_embeds_all_texts_the_baseline_at_its_default_and_at_its_best(
    run: tuple[CorpusResult, list[str]],
) -> None:
    result, _ = run
    ran = {(series.name, series.batch_size): series for series in result.series if series.seconds}
    ours, default, best = (ran[key] for key in ((OURS, None), (BASELINE, 32), (BASELINE, 2)))
    assert [series.is_default for series in (ours, default, best)] == [True, True, False]
    assert all(len(series.seconds) == 1 and series.peak_bytes > 10**7 for series in ran.values())
    assert ours.tokens == default.tokens == best.tokens > len(TEXTS)
    assert (ours.padding, result.texts) == (0, len(TEXTS))
    assert default.padding > best.padding > 0, "a larger batch has texts of more lengths"
    assert default.max_abs_error is None, "the others are compared with it"
    # Unit vectors: float32 sums in other orders.
    for series in (ours, best):
        assert series.max_abs_error is not None
        assert series.max_abs_error < 1e-6
    reasons = [
        str(series.unavailable) for series in result.series if "PyTorch" not in series.name and series.is_baseline
    ]
    assert len(reasons) == 3
    assert all("pipx in" in reason for reason in reasons)


def test_the_table_has_the_figures_and_why_others_have_none(run: tuple[CorpusResult, list[str]]) -> None:
    result, lines = run
    shortest, median, longest = result.lengths
    assert lines[0].endswith(f"24 texts; {shortest} to {longest} tokens, median {median}; one round")
    (row,) = [line for line in lines if line.strip().startswith(OURS)]
    ours = next(series for series in result.series if series.name == OURS)
    assert f"{24 / ours.median_seconds:,.1f}" in row
    assert "by tokens" in row
    # In bfloat16 as well, where the processor computes in it.
    in_float32 = [line for line in lines if "PyTorch, float32" in line]
    assert [re.sub(r".*float32 +| its.*", "", line) for line in in_float32] == ["32,", "2,"]
    assert [re.search("its (default|best)", line)[1] for line in in_float32] == ["default", "best"]
    assert any("OpenVINO, float32: not run: no environment" in line for line in lines)
    assert sum(line.endswith("compared with") for line in map(str.strip, lines)) == 1, "the baseline at its default"


@pytest.mark.nightly
def test_the_best_batch_size_is_one_of_those_that_are_asked_for(
    tiny_bundles: Any, corpus: Path, tmp_path: Path
) -> None:
    bundle = tiny_bundles("bert", "sentence-similarity")
    result, _ = measured(run_from_checkout, bundle, corpus, tmp_path, "1,4", PATH="/usr/bin:/bin")
    (best,) = [series for series in result.series if series.name == BASELINE and not series.is_default]
    assert best.batch_size in (1, 4)


@pytest.mark.nightly
def test_fastembed_embeds_the_same_texts_and_its_default_is_256(
    tiny_bundles: Any, corpus: Path, tmp_path: Path
) -> None:
    folder = Path(sys.prefix) / "fastembed"
    if not folder.is_dir():
        pytest.skip("no fastembed, which `make test-all` puts into a folder of its own")
    bundle = tiny_bundles("bert", "sentence-similarity")
    result, _ = measured(run_from_checkout, bundle, corpus, tmp_path, "2", PATH="/usr/bin:/bin", PYTHONPATH=str(folder))
    ours, *_ = [series for series in result.series if series.name == OURS]
    default, best = [series for series in result.series if series.name == FASTEMBED]
    assert [(series.batch_size, series.is_default) for series in (default, best)] == [(256, True), (2, False)]
    for series in (default, best):
        assert series.tokens == ours.tokens
        assert series.max_abs_error is not None
        assert series.max_abs_error < 1e-6


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda array: array, 0.0),
        (lambda array: array + np.eye(2, 3, dtype=np.float32) / 8, 0.125),
        (lambda array: array[:1], float("inf")),
        (lambda array: array * np.nan, float("inf")),
    ],
    ids=["the same", "one number", "a text is missing", "NaN"],
)
def test_wrong_vectors_differ(change: Any, difference: float) -> None:
    expected = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert largest_difference(change(expected), expected) == difference


@pytest.mark.parametrize(
    ("name", "count", "shortest", "longest"),
    [("short", 3000, 4, 20), ("passages", 1500, 25, 45), ("mixed", 200, 8, 1200), ("long", 16, 530, 4200)],
)
def test_a_sample_is_what_its_description_says_and_always_the_same(
    name: str, count: int, shortest: int, longest: int
) -> None:
    texts = texts_of(name)
    words = [len(text.split()) for text in texts]
    assert len(texts) == count
    assert shortest <= min(words) <= max(words) <= longest
    assert texts == texts_of(name)
    assert f"texts of {shortest:,} to {longest:,} words" in SAMPLES[name][0]


def test_other_tasks_are_refused(tiny_bundles: Any, corpus: Path) -> None:
    options = BenchOptions(bundles=(tiny_bundles("bert", "text-classification").path,))
    with pytest.raises(InputError, match="is a bundle of text-classification"):
        CorpusBench(options, str(corpus))


def test_openvino_runs_in_the_environment_of_the_optimum_cli_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    modules = ("optimum.intel", "json")
    assert python_of_optimum(*modules) is None
    command = tmp_path / "optimum-cli"
    for accepts in (0, 1):
        python = tmp_path / f"python{accepts}"
        python.write_text(f"#!/bin/sh\nexit {1 - accepts}\n")
        command.write_text(f"#!{python}\n")
        for file in (python, command):
            file.chmod(0o755)
        assert python_of_optimum(*modules) == (str(python) if accepts else None)
    command.write_text(f"#!{sys.executable}.missing\n")
    assert python_of_optimum(*modules) is None
