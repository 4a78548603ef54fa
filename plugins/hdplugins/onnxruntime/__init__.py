"""Operators of ONNX Runtime whose work is launches of compiled kernels, on an NVIDIA GPU."""
