"""Slots, copies, streams, graphs and arrays on a real GPU, without a TensorRT that supports it.

The simulated TensorRT computes with PyTorch on the streams and at the addresses that the runtime gives it. What its
answers prove on every machine, `tests/fakes` says; here the driver is the real one.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fakes.machine import HIDDEN, LONG, SHORT, new_batch
from fakes.simulated_tensorrt import add_engine
from fakes.tensorrt_on_gpu import TensorRtOnGpu, compute
from hdruntime.backends.tensorrt.runner import TensorRtRunner
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.gpu.options import GpuOptions
from support.comparators import assert_close, named_case
from support.tiny_bundle import HIDDEN_SIZE, TABLE, hidden_states, make_bundle


def view_on_cpu(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).reshape(shape)


def test_the_engine_of_these_tests_computes_the_tiny_model() -> None:
    for rows, tokens in ((1, 1), (3, 7), (2, 200)):
        batch = new_batch(rows, tokens)
        out = np.full((rows, tokens, HIDDEN_SIZE), np.nan, np.float32)
        scratch = np.full(32 * rows * tokens + 64, 0xFF, np.uint8)
        addresses = [values.ctypes.data for values in (*batch.values(), out, scratch)]
        table = torch.from_numpy(np.nan_to_num(TABLE))
        compute(view_on_cpu, *addresses, rows=rows, tokens=tokens, table=table)
        assert_close(out, hidden_states(batch["input_ids"], batch["attention_mask"]), atol=1e-5)


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bundle]:
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.cuda.init()
    trt = TensorRtOnGpu(driver, "tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    made = make_bundle(tmp_path / "bundle")
    yield add_engine(made, (SHORT, LONG))
    assert not trt.living, "execution contexts are left"


def runner_of(bundle: Bundle, **options: Any) -> TensorRtRunner:
    engine = bundle.manifest.engines[0]
    return TensorRtRunner(bundle, engine, backend=Backend(engine.variant), gpu=GpuOptions(**options))


def check(batch: dict[str, np.ndarray], found: Any) -> None:
    mask = batch["attention_mask"]
    expected = np.where(mask[..., None] == 1, hidden_states(batch["input_ids"], mask), 0)
    assert_close(found, expected, atol=1e-5)


def mixed(count: int) -> list[dict[str, np.ndarray]]:
    lengths = np.random.default_rng(0).choice([1, 20, 32, 33, 48, 60, 128, 200], count)
    kinds = ("none", "right", "left", "holes", "all")
    return [new_batch(1 + n % 3, int(tokens), kinds[n % 5], seed=n) for n, tokens in enumerate(lengths)]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["off", "on", "auto"])
def test_batches_in_flight_get_their_own_results(graphs: str, bundle: Bundle) -> None:
    """Copies of one batch overlap with computing another; graphs are captured and replayed in between."""
    runner = runner_of(bundle, graphs=graphs, max_graphs=3)
    batches, started = mixed(120), []
    for batch in batches:
        started.append((batch, runner.start(batch, [HIDDEN])))
        if len(started) == runner.max_in_flight:
            first, results = started.pop(0)
            check(first, results()[HIDDEN])
    for batch, results in started:
        check(batch, results()[HIDDEN])
    if graphs != "off":
        assert graphs == "auto" or runner._model._graphs, "nothing was captured"
    runner.close()


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["off", "on"])
def test_threads_get_their_own_results(graphs: str, bundle: Bundle) -> None:
    runner = runner_of(bundle, graphs=graphs)
    batches = mixed(80)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda batch: runner.start(batch, [HIDDEN])()[HIDDEN], batches)
        for batch, answers in zip(batches, found, strict=True):
            check(batch, answers)
    runner.close()


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["off", "on"])
def test_arrays_of_another_library_are_read_and_answered_on_its_stream(graphs: str, bundle: Bundle) -> None:
    """The other library computes its inputs late, and reads the answers at once, on a stream of its own."""
    runner = runner_of(bundle, graphs=graphs)
    side = torch.cuda.Stream()
    for dtype in (torch.int64, torch.int32):
        for batch in mixed(30):
            with torch.cuda.stream(side):
                torch.cuda._sleep(300_000)
                # PyTorch takes no array with a negative stride, not even of one value.
                given = {
                    name: torch.from_numpy(np.array(values, order="C")).to("cuda", dtype)
                    for name, values in batch.items()
                }
                answer = runner.start_on_device(given, [HIDDEN])[HIDDEN]
                found = torch.from_dlpack(answer).clone()
            with named_case(dtype, *batch["input_ids"].shape):
                side.synchronize()
                check(batch, found.cpu().numpy())
    runner.close()


@pytest.mark.gpu
def test_an_array_that_a_second_thread_releases_during_a_capture_is_freed_afterwards(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freeing waits for the context, which the driver refuses while a stream is captured."""
    runner = runner_of(bundle, graphs="on")
    batch = new_batch(2, 20)
    check(batch, runner.start(batch, [HIDDEN])()[HIDDEN])
    held = [runner.start_on_device({k: torch.from_numpy(v).cuda() for k, v in new_batch(2, 60).items()}, [HIDDEN])]
    device, freed = runner._device, []
    call = device.call

    def released_before_the_capture_ends(name: str, *arguments: Any) -> Any:
        if name == "cuStreamEndCapture" and held:
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()
            freed.append(len(device._garbage))
        return call(name, *arguments)

    monkeypatch.setattr(device, "call", released_before_the_capture_ends)
    for _ in range(3):
        check(batch, runner.start(batch, [HIDDEN])()[HIDDEN])
    assert freed, "no graph was captured"
    assert freed[0] > 0, "the array was freed during the capture"
    assert runner._model._graphs, "the capture failed"
    with device.current():
        assert not device._garbage
    runner.close()


@pytest.mark.gpu
def test_closing_gives_everything_back(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, for the memory of the GPU is other processes' too."""
    made: Counter[str] = Counter()
    runner = runner_of(bundle, graphs="on", max_graphs=2)
    call = runner._device.call

    def counted(name: str, *arguments: Any) -> Any:
        result = call(name, *arguments)
        made[name] += 1
        return result

    monkeypatch.setattr(runner._device, "call", counted)
    for batch in mixed(30):
        check(batch, runner.start(batch, [HIDDEN])()[HIDDEN])
    runner.close()
    pairs = {"cuMemAlloc": "cuMemFree", "cuMemHostAlloc": "cuMemFreeHost", "cuGraphInstantiate": "cuGraphExecDestroy"}
    for new, old in pairs.items():
        assert made[new] <= made[old], made
    assert made["cuGraphLaunch"] > 0
