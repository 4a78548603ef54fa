"""The simulated TensorRT on a real GPU: its engine is the model of `support.tiny_bundle`, computed by PyTorch.

Streams, events, copies, graphs and memory are the driver's own, so that the runtime is tried on them without a
TensorRT that supports the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fakes.simulated_tensorrt import Bound, ICudaEngine, SimulatedTensorRt
from support.tiny_bundle import HIDDEN_SIZE, TABLE

_TYPES = {torch.float32: "<f4", torch.int64: "<i8", torch.int32: "<i4", torch.uint8: "|u1"}

_DELAY_CYCLES = 300_000
"""About 0.2 ms of a GPU's clock."""

View = Callable[[int, tuple[int, ...], torch.dtype], torch.Tensor]
"""(address, shape, dtype) -> the memory as a tensor."""


class _Memory:
    """Memory of the GPU, as other libraries take it."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": _TYPES[dtype], "data": (int(address), False), "version": 3, "strides": None,
        }  # fmt: skip


def view_on_gpu(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """See `View`; kept by nobody, and freed by whoever allocated it."""
    return torch.as_tensor(_Memory(address, shape, dtype), device="cuda")


def compute(view: View, ids: int, mask: int, out: int, scratch: int, *, rows: int, tokens: int, table: Any) -> None:
    """Write the model's hidden states to `out`; intermediate results are in scratch memory, and nothing is allocated.

    Args:
        view: of memory.
        ids: address of the input, int64 [rows, tokens]; `mask` likewise.
        out: address of the output, float32 [rows, tokens, HIDDEN_SIZE].
        scratch: address of 32 bytes a token.
        rows, tokens: of the batch.
        table: the model's vectors of words, where the memory is.
    """
    count = rows * tokens
    words = view(scratch, (count, HIDDEN_SIZE), torch.float32)
    weights = view(scratch + 16 * count, (rows, tokens, 1), torch.float32)
    real = view(scratch + 20 * count, (rows, 1, 1), torch.float32)
    total = view(scratch + 20 * count + 4 * rows, (rows, 1, HIDDEN_SIZE), torch.float32)
    hidden = view(out, (rows, tokens, HIDDEN_SIZE), torch.float32)
    torch.index_select(table, 0, view(ids, (count,), torch.int64), out=words)
    if table.is_cuda:
        torch.cuda._sleep(_DELAY_CYCLES)  # whoever reads too early, or shares the memory, is wrong
    states = words.view(rows, tokens, HIDDEN_SIZE)
    weights.copy_(view(mask, (rows, tokens, 1), torch.int64))
    torch.sum(weights, 1, keepdim=True, out=real)
    torch.mul(states, weights, out=hidden)
    torch.sum(hidden, 1, keepdim=True, out=total)
    total.div_(real.clamp_(min=1.0))
    torch.add(states, total, out=hidden)


class GpuOfTests:
    """What the simulated TensorRT asks of a GPU, answered by the driver.

    Args:
        driver: the module ``cuda.bindings.driver``.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.faults: list[str] = []

    def capturing(self, stream: int) -> Any:
        """A note on the stream, if it is being captured."""
        code, status = self._driver.cuStreamIsCapturing(self._driver.CUstream(int(stream)))
        assert int(code) == 0, code
        active = status != self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        return SimpleNamespace(invalid=False) if active else None


class TensorRtOnGpu(SimulatedTensorRt):
    """See the module. Its engines take ids and a mask, and give hidden states."""

    def __init__(self, driver: Any, variant: str) -> None:
        super().__init__(GpuOfTests(driver), variant)  # type: ignore[arg-type]
        finite = np.nan_to_num(TABLE)  # the word "nan" is in no test of this engine
        self._table = torch.from_numpy(finite).cuda()

    def enqueue(self, stream: int, context: Any, engine: ICudaEngine, bound: Bound) -> None:
        rows, tokens = bound.shape
        addresses = [bound.addresses[name] for name in ("input_ids", "attention_mask", "last_hidden_state")]
        with torch.cuda.stream(torch.cuda.ExternalStream(int(stream))):
            compute(view_on_gpu, *addresses, bound.scratch[0], rows=rows, tokens=tokens, table=self._table)
