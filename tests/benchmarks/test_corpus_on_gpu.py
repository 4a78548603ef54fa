"""The benchmark of a corpus on a GPU, tested without one: each process's request, and columns from NVML's answers."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.corpus import bench, embed_script, encode_script
from benchmarks.corpus.bench import CorpusBench, CorpusResult, CorpusSeries
from benchmarks.corpus.gpu_watch import GpuWatch
from benchmarks.corpus.table import print_corpus
from fakes.simulated_nvml import IDLE_BYTES, SimulatedNvml
from hdexport.bench.measure.processes import ProcessOutcome
from hdexport.bench.results.result import RunStatus
from hdexport.bench.run import plan
from hdexport.bench.run.plan import BenchOptions
from hdruntime.backends.entry import ThisMachine
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import InputError
from hdruntime.gpu.driver import Gpu
from support.waiting import wait_until

HOPPER = Gpu(name="NVIDIA H100", architecture="sm90", memory_bytes=80 * 10**9)
MACHINE = ThisMachine(gpu=HOPPER, driver="580.65", versions={Backend.ONNXRUNTIME_CUDA: "1.31.1"})
EAGER, COMPILED = (f"sentence-transformers, PyTorch, float16{how}" for how in ("", ", torch.compile"))
TAKEN_BYTES = {embed_script.__file__: 2 * 10**9, encode_script.__file__: 7 * 10**9}


class SimulatedRuns:
    """Processes that keep the GPU 90 % busy for two seconds, of which each takes none, and leave the same vectors.

    Attributes:
        requests: script and what it was asked, in order.
        changes: of a script's answer, by its request.
    """

    def __init__(self, nvml: SimulatedNvml) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.changes: Callable[[dict[str, Any]], dict[str, Any]] = lambda request: {}
        self._nvml = nvml
        nvml.busy_percent = 90

    def __call__(self, arguments: Sequence[str], *, python: str | None, time_limit_s: float) -> ProcessOutcome:
        script, file = arguments
        request = json.loads(Path(file).read_text())
        self.requests.append((script, request))
        self._nvml.used_bytes = IDLE_BYTES + TAKEN_BYTES[script]
        if any(thread.name == "GPU memory" for thread in threading.enumerate()):
            looks = self._nvml.looks
            wait_until(lambda: self._nvml.looks >= looks + 3, seconds=10)
        ended = time.monotonic()
        np.save(request["output"], np.ones((2, 2), np.float32))
        # As of two seconds ago: NVML's samples of the first one say what was before.
        figures = {"seconds": 0.5, "began": ended - 2, "ended": ended, "tokens": 90, "computed_tokens": 100}
        figures["seconds_by_size"] = {str(size): 1 / size for size in request.get("batch_sizes", ())}
        figures |= self.changes(request)
        self._nvml.used_bytes = IDLE_BYTES
        status = RunStatus(figures.get("status", RunStatus.OK))
        return ProcessOutcome(status=status, output=figures, reason=figures.get("reason"), peak_rss_bytes=10**9)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimulatedNvml:
    simulated = SimulatedNvml()
    monkeypatch.setitem(sys.modules, "pynvml", simulated)
    return simulated


@pytest.fixture
def runs(nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch) -> SimulatedRuns:
    simulated = SimulatedRuns(nvml)
    monkeypatch.setattr(bench, "run_process", simulated)
    monkeypatch.setattr(plan, "this_machine", lambda: MACHINE)
    about = {"cpu": "a CPU", "threads": "1", "gpu": HOPPER.name}
    monkeypatch.setattr(bench, "environment", lambda threads: about)
    return simulated


def measured(
    tiny_bundles: Any, *, has_baselines: bool = True, **options: Any
) -> tuple[CorpusResult, list[CorpusSeries]]:
    made, heard = tiny_bundles("bert", "sentence-similarity"), []
    asked = BenchOptions(bundles=(made.path,), model=str(made.checkpoint), rounds=2, **options)
    return CorpusBench(asked, "long", has_baselines=has_baselines, on_run=heard.append).result(), heard


def test_all_series_run_on_the_gpu_and_the_baselines_in_float16_at_their_default_and_best_sizes(
    tiny_bundles: Any, runs: SimulatedRuns
) -> None:
    result, heard = measured(tiny_bundles)
    ran = [(series.name, series.batch_size) for series in result.series if series.seconds]
    in_float16 = [key for key in ran if "float32" not in key[0]]
    ours = "bundle (onnxruntime_cuda)"
    assert in_float16 == [(ours, None), (EAGER, 32), (EAGER, 512), (COMPILED, 32), (COMPILED, 512)]
    assert (result.device, result.texts) == ("cuda", 160)
    left_out = [series.unavailable for series in result.series if not series.seconds]
    assert left_out == ["it runs on the CPU: measure it with --device cpu"] * len(left_out)
    asked = [request for script, request in runs.requests if script == encode_script.__file__]
    searches = [request for request in asked if len(request["batch_sizes"]) > 1]
    # Of the bundle's type, and of float16; never with the compiler.
    assert [(each["dtype"], each["compiled"]) for each in searches] == [("float32", False), ("float16", False)]
    assert all(each["batch_sizes"] == [16, 32, 64, 128, 256, 512] for each in searches)
    assert {request["device"] for request in asked} == {"cuda"}
    assert [request["least_seconds"] for request in asked if request not in searches] == [3.0] * (len(heard) - 2)
    # In turns: every series once, then every series again.
    assert [series.title for series in heard] == [series.title for series in result.series if series.seconds] * 2


def test_a_series_has_the_gpus_share_of_each_round_and_the_rise_of_its_memory(
    tiny_bundles: Any, runs: SimulatedRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    result, _ = measured(tiny_bundles)
    by_title = {series.title: series for series in result.series}
    for title, taken in (("bundle (onnxruntime_cuda)", 2), (f"{EAGER}, batch 32", 7)):
        series = by_title[title]
        assert series.gpu_busy_share == pytest.approx((0.9, 0.9))
        assert series.gpu_peak_bytes == taken * 10**9
    print_corpus(result)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("long: 160 texts of 530 to 4,200 words;")
    assert lines[2] == HOPPER.name
    (row,) = [line for line in lines if "onnxruntime_cuda" in line]
    assert re.search(" 90% +2,000 MB +1,000 MB ", row)


def test_what_nvml_does_not_say_is_not_known_and_never_0(
    tiny_bundles: Any, runs: SimulatedRuns, nvml: SimulatedNvml, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.changes = lambda request: {"began": time.monotonic() - 0.1}
    shorter, _ = measured(tiny_bundles, has_baselines=False)
    (ours,) = [series for series in shorter.series if series.seconds]
    assert ours.gpu_busy_share == (), "the run was shorter than what a sample is of"
    assert ours.gpu_peak_bytes == 2 * 10**9
    print_corpus(shorter)
    assert re.search(" not known +2,000 MB +1,000 MB ", capsys.readouterr().out)


def test_a_compiler_that_takes_too_long_and_a_model_that_does_not_fit_are_results(
    tiny_bundles: Any, runs: SimulatedRuns
) -> None:
    late = {"status": "timeout", "reason": "torch.compile took more than 60 s"}
    runs.changes = lambda request: late if request.get("compiled") else {}
    result, _ = measured(tiny_bundles)
    reasons = {series.name: series.unavailable for series in result.series}
    assert (reasons[COMPILED], reasons[EAGER]) == ("torch.compile took more than 60 s", None)
    runs.changes = lambda request: {"status": "OOM", "reason": "no memory"} if "compiled" in request else {}
    result, _ = measured(tiny_bundles)
    reasons = {series.name: series.unavailable for series in result.series}
    assert (reasons[EAGER], reasons[COMPILED]) == ("no memory", "it did not run without torch.compile")


def test_the_cpu_is_measured_where_it_is_asked_for_and_a_gpu_is_refused_where_there_is_none(
    tiny_bundles: Any, runs: SimulatedRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in ({"device": "cpu"}, {"backends": ("onnxruntime",)}):
        result, _ = measured(tiny_bundles, has_baselines=False, **options)
        assert (result.device, result.texts) == ("cpu", 16)
        (ours,) = [series for series in result.series if series.name == "bundle (onnxruntime)"]
        assert (ours.gpu_busy_share, ours.gpu_peak_bytes) == ((), None)
    without = ThisMachine(gpu=None, driver=None, versions={})
    monkeypatch.setattr(plan, "this_machine", lambda: without)
    with pytest.raises(InputError, match=r"none of these runs on a GPU here:\nbundle \(onnxruntime\): it runs on"):
        measured(tiny_bundles, device="cuda")


def test_the_watch_averages_the_looks_of_the_measured_time(nvml: SimulatedNvml) -> None:
    with GpuWatch() as watch:
        wait_until(lambda: nvml.looks > 0)
        nvml.busy_percent, seen = 80, nvml.looks
        wait_until(lambda: nvml.looks > seen + 1)
        middle, seen = time.monotonic(), nvml.looks
        wait_until(lambda: nvml.looks > seen + 1)
        ended = time.monotonic()
    assert watch.busy_share(middle - 1, ended) == pytest.approx(0.8)
    assert 0 < (watch.busy_share(ended - 60, ended) or 0) < 0.8
    assert watch.busy_share(ended, ended + 60) is None
    nvml.busy_percent, nvml.looks = None, 0
    with GpuWatch() as watch:
        wait_until(lambda: nvml.looks > 1)
    assert watch.busy_share(0, time.monotonic()) is None
    assert watch.peak_bytes == 0


class SimulatedModel:
    """An encoder whose batches of more than 64 texts do not fit."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def encode(self, texts: Sequence[str], *, batch_size: int) -> np.ndarray:
        self.sizes.append(batch_size)
        if batch_size > 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 68.00 GiB.")
        return np.ones((len(texts), 2), np.float32)


def request_of(folder: Path, sizes: Sequence[int], **others: Any) -> str:
    texts, request = folder / "texts.json", folder / "request.json"
    texts.write_text(json.dumps(["a text"] * 8))
    asked = {"texts": str(texts), "backend": "torch", "device": "cuda", "compiled": False, "batch_sizes": list(sizes)}
    asked |= {"warm_up_texts": 4, "least_seconds": 0.0, "output": str(folder / "vectors.npy")}
    request.write_text(json.dumps(asked | others))
    return str(request)


def test_the_best_size_is_searched_among_those_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = SimulatedModel()
    monkeypatch.setattr(encode_script, "_sentence_transformers", lambda request, count: model.encode)
    encode_script.main(request_of(tmp_path, [16, 64, 128]))
    assert set(json.loads(capsys.readouterr().out)["seconds_by_size"]) == {"16", "64"}
    assert model.sizes == [16, 16, 64, 64, 128], "each warms up with its own batches"
    with pytest.raises(torch.OutOfMemoryError, match=r"68\.00 GiB"):
        encode_script.main(request_of(tmp_path, [128]))
    with pytest.raises(MemoryError, match="No batch size fits"):
        encode_script.main(request_of(tmp_path, [128, 256]))


def test_a_compiler_is_not_waited_for_longer_than_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(encode_script, "_MOST_COMPILE_SECONDS", 0.0)
    monkeypatch.setattr(encode_script.os, "_exit", lambda code: ended.set())

    def compile_long(texts: Sequence[str], *, batch_size: int) -> np.ndarray:
        assert ended.wait(60)
        return np.ones((len(texts), 2), np.float32)

    monkeypatch.setattr(encode_script, "_sentence_transformers", lambda request, count: compile_long)
    encode_script.main(request_of(tmp_path, [32], compiled=True))
    said, *_ = map(json.loads, capsys.readouterr().out.splitlines())
    assert said["status"] == "timeout"
    assert said["reason"].startswith("torch.compile took more than")


def test_the_model_is_of_the_asked_type_and_its_layers_are_compiled_for_every_shape(
    tiny_bundles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: compiled.append((module, options)))
    checkpoint = tiny_bundles("bert", "sentence-similarity").checkpoint
    request = {"model": str(checkpoint), "backend": "torch", "device": "cpu", "dtype": "float16", "compiled": True}
    count = {"real": 0, "computed": 0}
    encode = encode_script._sentence_transformers(
        request | {"threads": torch.get_num_threads(), "max_length": 16, "scaled_for": None}, count
    )
    assert len(compiled) > 1
    for layer, options in compiled:
        assert type(layer).__name__ == "BertLayer"
        assert options == {"dynamic": True}
        assert {parameter.dtype for parameter in layer.parameters()} == {torch.float16}
    encode(["w1 w2", "w1 w2 w3 w4"], batch_size=2)
    assert int(count["real"]) < count["computed"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch has no CUDA")
def test_a_gpu_that_multiplies_is_busy() -> None:
    values = torch.ones(4096, 4096, device="cuda")
    with GpuWatch() as watch:
        began = time.monotonic()
        while time.monotonic() - began < 2.5:
            values = values @ values
            torch.cuda.synchronize()
        share = watch.busy_share(began, time.monotonic())
    if share is None:
        pytest.skip("NVML does not say how busy this GPU is")
    assert 0.5 < share <= 1
