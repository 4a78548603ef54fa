"""What ONNX Runtime runs, on CPUs and on NVIDIA GPUs."""
