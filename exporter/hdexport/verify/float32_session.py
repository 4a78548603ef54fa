"""A session in float32 within a build's memory."""

from __future__ import annotations

import hdruntime
from hdruntime.backends.precision import Precision
from hdruntime.bundle.reader import Bundle
from hdruntime.process_limits import free_bytes

MAX_COPIES_BYTES = 2**30
"""Bytes of float32 copies of half-precision weights that a build makes at once; where memory is short, four fifths of
what is free. ONNX Runtime upcasts the weights of a
larger model in each run, and what computes in copies alone runs in parts."""


def float32_session(bundle: Bundle, *, threads: int | None = None) -> hdruntime.Session:
    """A session of the whole graph in ONNX Runtime on the CPU, whose float32 copies take `MAX_COPIES_BYTES` or none."""
    from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner

    copies_bytes = min(MAX_COPIES_BYTES, (free_bytes() or MAX_COPIES_BYTES) * 4 // 5)

    return hdruntime.Session(
        bundle,
        OnnxRuntimeRunner(bundle, threads=threads, precision=Precision.FLOAT32, copies_bytes=copies_bytes),
    )
