"""The machine's ceilings: measured on this CPU, and on a GPU if there is one."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hdexport.bench.measure import ceilings
from hdexport.bench.measure.ceilings import measured_ceilings, replayed_ms, times_ms
from hdexport.bench.measure.remote import run_function
from hdexport.bench.results.result import Ceilings
from hdruntime.errors import InputError


@pytest.fixture(scope="module")
def measured() -> Ceilings:
    """Of one thread, in a process of its own."""
    outcome, found = run_function(partial(measured_ceilings, "cpu", threads=1), time_limit_s=120)
    assert found is not None, outcome.reason
    return found


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch has no CUDA")
def test_a_call_is_captured_once_and_replayed_and_a_gpu_has_ceilings() -> None:
    calls = []
    values = torch.zeros(16, device="cuda")
    times = replayed_ms(lambda: (calls.append(1), values.add_(1)), least_s=0.0)
    assert len(times) == 3
    assert min(times) > 0
    assert len(calls) == 4  # three warm it up, one is captured
    was = torch.backends.cuda.matmul.allow_tf32
    exact, rounded = (measured_ceilings("cuda", dtype) for dtype in ("float32", "tf32"))
    assert rounded.matmul_flops_per_s > 1.2 * exact.matmul_flops_per_s > 1e12
    assert 1e11 < exact.copy_bytes_per_s < 1e14
    assert torch.backends.cuda.matmul.allow_tf32 == was
