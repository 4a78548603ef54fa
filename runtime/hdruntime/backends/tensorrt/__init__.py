"""TensorRT, TensorRT-RTX and TensorRT's lean runtime on an NVIDIA GPU. How it works: docs/tensorrt_runtime.md."""

from __future__ import annotations

__all__ = ["TensorRtRunner"]

from hdruntime.backends.tensorrt.runner import TensorRtRunner
