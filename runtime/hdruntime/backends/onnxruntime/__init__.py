"""ONNX Runtime, on CPUs and on NVIDIA GPUs."""

from typing import Final

CPU_LOWERING: Final = "onnxruntime_cpu"
"""``GraphFile.lowering`` of the graph for a CPU."""

CUDA_LOWERING: Final = "onnxruntime_cuda"
"""``GraphFile.lowering`` of the graph for an NVIDIA GPU; not every bundle has it."""

CUDA_PROVIDER = "CUDAExecutionProvider"
"""The execution provider for NVIDIA GPUs."""
