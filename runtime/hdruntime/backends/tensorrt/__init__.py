"""TensorRT, TensorRT-RTX and TensorRT's lean runtime on an NVIDIA GPU. How it works: docs/tensorrt_runtime.md."""
