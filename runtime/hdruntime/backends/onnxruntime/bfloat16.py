"""bfloat16 in ONNX Runtime on a CPU: the fast math for ARM, which rounds the inputs of matmuls."""

from __future__ import annotations

import functools
import platform

import numpy as np

from hdruntime.backends.bundle_runner import needs_float32
from hdruntime.backends.forking import no_fork
from hdruntime.backends.onnxruntime import HAS_FAST_MATH
from hdruntime.backends.onnxruntime.sessions import session_options
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import BackendUnavailableError

_ROWS, _COLUMNS = 32, 8
"""Size of the second matrix of `_PRODUCT`; fast math leaves out matrices of fewer than 32 numbers."""

_PRODUCT = (
    "080812003a550a110a01610a016212017922064d61744d756c1201675a130a0161120e0a0c080112080a0208010a0208205a130a0162120e"
    "0a0c080112080a0208200a02080862130a0179120e0a0c080112080a0208010a02080842040a00100d"
)
"""An ONNX graph, the ``MatMul`` of `a` [1, 32] and `b` [32, 8], float32."""


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether matmuls of a session in bfloat16 round their inputs; a matmul of numbers that only float32 has shows it.

    A processor without bfloat16 instructions, or a build of ONNX Runtime without its kernels, computes in float32 and
    does not say so.
    """
    import onnxruntime

    ones, more = np.ones((_ROWS, _COLUMNS), np.float32), np.full((1, _ROWS), 1 + 2**-10, np.float32)
    with no_fork():
        session = onnxruntime.InferenceSession(
            bytes.fromhex(_PRODUCT),
            session_options(1, precision=Precision.BFLOAT16),
            providers=["CPUExecutionProvider"],
        )
        (product,) = session.run(None, {"a": more, "b": ones})
    return bool((product == _ROWS).all())


def check_bfloat16(manifest: Manifest) -> None:
    """Reject bfloat16 where ONNX Runtime does not compute in it, or where it would make a bundle's outputs wrong.

    Raises:
        BackendUnavailableError: the platform, the processor or the bundle.
    """
    hint = "Leave out the precision, or use auto, which is float32 here."
    if not HAS_FAST_MATH:
        raise BackendUnavailableError(
            f"ONNX Runtime computes in bfloat16 only on Linux on aarch64, and this is {platform.system()} on "
            f"{platform.machine()}.",
            hint="Leave out the precision, or use the backend openvino.",
        )
    if not multiplies_bfloat16():
        raise BackendUnavailableError(
            "ONNX Runtime does not compute in bfloat16 on this processor, which lacks the instructions: Linux lists "
            "bf16 among the features of those that have them (Neoverse V1, N2, V2 and newer).",
            hint=hint,
        )
    if needs_float32(manifest):
        raise BackendUnavailableError(
            "This bundle sorts tokens by hashes, whose counts bfloat16 rounds: its outputs would be wrong.", hint=hint
        )
