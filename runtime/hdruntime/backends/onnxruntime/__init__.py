"""ONNX Runtime, on CPUs and on NVIDIA GPUs."""

import platform
import sys
from typing import Final

CPU_LOWERING: Final = "onnxruntime_cpu"
"""``GraphFile.lowering`` of the graph for a CPU."""

CUDA_LOWERING: Final = "onnxruntime_cuda"
"""``GraphFile.lowering`` of the graph for an NVIDIA GPU; not every bundle has it."""

ZEROED_OUTPUTS: Final = "hdexport.zeroed_outputs"
"""Key of a graph's metadata: names of the outputs that the graph itself makes 0 at padding, as JSON."""

CUDA_PROVIDER = "CUDAExecutionProvider"
"""The execution provider for NVIDIA GPUs."""

FAST_MATH: Final = "mlas.enable_gemm_fastmath_arm64_bfloat16"
"""Key of a session's configuration: ``1`` rounds the inputs of float32 matmuls to bfloat16."""

HAS_FAST_MATH: Final = sys.platform == "linux" and platform.machine() == "aarch64"
"""Whether ONNX Runtime is built with fast math for this platform (its sources, 1.31.1); elsewhere it accepts the key
and computes in float32."""
