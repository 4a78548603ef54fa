"""The best rates of a machine."""

from __future__ import annotations

import pytest
import torch

from benchmarks.roofline import ceilings
from benchmarks.roofline.ceilings import measured_ceilings, replayed_ms
from hdruntime.errors import InputError


def test_the_ceilings_of_a_cpu_are_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one product, and a copy of 64 MB."""
    monkeypatch.setitem(ceilings._PRODUCTS, "cpu", ((256, 768, 3072),))
    monkeypatch.setattr(ceilings, "_COPY_BYTES", 2**26)
    measured = measured_ceilings("cpu", threads=1)
    assert (measured.device, measured.dtype) == ("cpu", "float32")
    assert 1e9 < measured.matmul_flops_per_s < 1e12
    assert 0.5e9 < measured.copy_bytes_per_s < 1e12


def test_what_has_no_ceiling_is_refused() -> None:
    for device, dtype in (("tpu", "float32"), ("cpu", "tf32"), ("cpu", "float64"), ("cuda", "int8")):
        with pytest.raises(InputError, match=f"{device} in {dtype} cannot be measured(.|\\n)*bfloat16"):
            pytest.fail(f"{device} in {dtype} gives {measured_ceilings(device, dtype)}")


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
    for dtype in ("tf32", "float16"):
        found = measured_ceilings("cuda", dtype)
        assert 1e12 < found.matmul_flops_per_s < 1e17
        assert 1e11 < found.copy_bytes_per_s < 1e14
    assert torch.backends.cuda.matmul.allow_tf32 == was
