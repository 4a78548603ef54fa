"""The machine's ceilings: measured on this CPU, and the calls that a GPU would get, on a recording one."""

from __future__ import annotations

import functools
import io
import itertools
import json
import logging
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from hdexport.bench.measure import ceilings
from hdexport.bench.measure.ceilings import measured_ceilings, replayed_ms, times_ms
from hdexport.bench.results.result import Ceilings
from hdruntime.errors import InputError


@pytest.fixture(scope="module")
def measured() -> Iterator[Ceilings]:
    """Of one thread, as the program prints them."""
    threads, printed = torch.get_num_threads(), io.StringIO()
    with redirect_stdout(printed):
        assert ceilings.main(["--device", "cpu", "--threads", "1"]) == 0
    yield Ceilings(**json.loads(printed.getvalue()))
    torch.set_num_threads(threads)


def test_the_ceilings_of_a_cpu_are_such_as_cpus_have(measured: Ceilings) -> None:
    assert (measured.device, measured.dtype) == ("cpu", "float32")
    assert 1e9 < measured.matmul_flops_per_s < 1e12
    assert 0.5e9 < measured.copy_bytes_per_s < 1e12


@pytest.mark.nightly
def test_no_product_of_a_model_is_faster_than_the_ceiling(measured: Ceilings) -> None:
    """On one thread, as the ceiling; a third more is left to a machine that others disturb."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        hidden, weight = torch.randn(512, 384), torch.randn(384, 1536)
        best_ms = min(times_ms(lambda: hidden @ weight, device="cpu", least_s=0.1))
    finally:
        torch.set_num_threads(threads)
    assert 2 * 512 * 384 * 1536 / best_ms * 1e3 < 4 / 3 * measured.matmul_flops_per_s


def test_the_ceiling_is_the_fastest_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    for by_pytorch, by_onnxruntime in ((3.0, 2.0), (2.0, 3.0)):
        monkeypatch.setattr(ceilings, "_rate_of_product", lambda *_, _rate=by_pytorch, **__: _rate)
        monkeypatch.setattr(ceilings, "_rate_by_onnxruntime", lambda *_, _rate=by_onnxruntime, **__: _rate)
        monkeypatch.setattr(ceilings, "_rate_of_copy", lambda *_: 5.0)
        assert measured_ceilings("cpu").matmul_flops_per_s == 3.0


@pytest.mark.parametrize(
    ("device", "dtype"), [("tpu", "float32"), ("cpu", "tf32"), ("cpu", "float64"), ("cuda", "int8")]
)
def test_what_has_no_ceiling_is_refused(device: str, dtype: str) -> None:
    with pytest.raises(InputError, match=f"{device} in {dtype} cannot be measured(.|\\n)*bfloat16"):
        measured_ceilings(device, dtype)


def test_a_copy_is_larger_than_the_caches_or_a_warning_says_that_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for index, size in enumerate(("48K", "2048K", "300M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    monkeypatch.setattr(ceilings, "_CACHES", tmp_path)
    monkeypatch.setattr(ceilings, "free_bytes", lambda: 2**40)
    assert ceilings._copy_bytes(torch, "cpu") == 600 * 2**20
    assert not caplog.records
    monkeypatch.setattr(ceilings, "free_bytes", lambda: 2**30)
    with caplog.at_level(logging.WARNING):
        assert ceilings._copy_bytes(torch, "cpu") == 2**27
    assert "may be that of caches" in caplog.text
    monkeypatch.setattr(ceilings, "_CACHES", tmp_path / "not there")
    assert ceilings._copy_bytes(torch, "cpu") == 2**27


class RecordingCuda:
    """The part of ``torch.cuda`` that a measurement calls; a replay of what it captured takes 2 ms, the first 4."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._clock_ms = 0.0
        self._replay_ms = itertools.chain([4.0], itertools.repeat(2.0))

    def said(self, what: str) -> Callable[..., None]:
        return lambda *_: self.log.append(what)

    def as_module(self) -> types.SimpleNamespace:
        stream = types.SimpleNamespace(wait_stream=self.said("wait"))
        return types.SimpleNamespace(
            Stream=lambda: stream,
            current_stream=lambda: stream,
            stream=self._block("on a side stream"),
            graph=self._block("captured"),
            CUDAGraph=lambda: types.SimpleNamespace(replay=self._replay),
            Event=self._event,
            synchronize=self.said("synchronize"),
            mem_get_info=lambda: (2**36, 2**37),
        )

    def _block(self, name: str) -> Callable[[object], Any]:
        @contextmanager
        def block(_: object) -> Iterator[None]:
            self.log.append(f"{name} (")
            yield
            self.log.append(")")

        return block

    def _replay(self) -> None:
        self._clock_ms += next(self._replay_ms)
        self.log.append("replay")

    def _event(self, *, enable_timing: bool) -> types.SimpleNamespace:
        assert enable_timing
        event = types.SimpleNamespace()
        event.record = lambda: setattr(event, "at_ms", self._clock_ms)
        event.elapsed_time = lambda end: end.at_ms - event.at_ms
        return event


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> RecordingCuda:
    """Tensors "on the GPU" are on the CPU, and small."""
    recording = RecordingCuda()
    monkeypatch.setattr(torch, "cuda", recording.as_module())
    monkeypatch.setattr(ceilings, "_FLUSH_BYTES", 16)
    for name in ("empty", "zeros", "randn"):
        monkeypatch.setattr(torch, name, _on_the_cpu(getattr(torch, name)))
    return recording


def _on_the_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*sizes: int, device: str | None = None, **options: Any) -> torch.Tensor:
        assert device in ("cuda", None)
        return make(*sizes, **options)

    return made


def test_a_call_is_warmed_up_captured_once_and_replayed(cuda: RecordingCuda) -> None:
    times = replayed_ms(lambda: cuda.log.append("call"), least_s=0.02)
    # 20 ms in replays of 4 ms, as the first one took.
    assert times == [2.0] * 5
    assert cuda.log == [
        *("wait", "on a side stream (", "call", "call", "call", ")", "wait", "captured (", "call", ")"),
        *("replay", "synchronize", *["replay"] * 5, "synchronize"),
    ]
    assert len(replayed_ms(lambda: None, least_s=0.0)) == 3


def test_the_ceilings_of_a_gpu_come_from_the_times_of_replays(
    cuda: RecordingCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ceilings._PRODUCTS, "cuda", ((8, 16, 32), (64, 16, 32)))
    monkeypatch.setitem(ceilings._LEAST_COPY_BYTES, "cuda", 1000)
    seen = []
    product = torch.mm

    def mm(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        seen.append((left.dtype, torch.backends.cuda.matmul.allow_tf32))
        return product(left, right, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    was = torch.backends.cuda.matmul.allow_tf32
    found = measured_ceilings("cuda", "tf32")
    # The larger product, and 1000 bytes read and written, in 2 ms each.
    assert found.matmul_flops_per_s == pytest.approx(2 * 64 * 16 * 32 / 2e-3)
    assert found.copy_bytes_per_s == pytest.approx(2 * 1000 / 2e-3)
    assert set(seen) == {(torch.float32, True)}
    assert torch.backends.cuda.matmul.allow_tf32 == was
    seen.clear()
    measured_ceilings("cuda", "float16")
    assert set(seen) == {(torch.float16, False)}
