"""ONNX Runtime, on CPUs and on NVIDIA GPUs."""

from typing import Final

CPU_LOWERING: Final = "onnxruntime_cpu"
"""``GraphFile.lowering`` of the graph for a CPU."""

CUDA_LOWERING: Final = "onnxruntime_cuda"
"""``GraphFile.lowering`` of the graph for an NVIDIA GPU; not every bundle has it."""

ZEROED_OUTPUTS: Final = "hdexport.zeroed_outputs"
"""Key of a graph's metadata: names of the outputs that the graph itself makes 0 at padding, as JSON."""

CUDA_PROVIDER = "CUDAExecutionProvider"
"""The execution provider for NVIDIA GPUs."""
