"""ONNX graphs: traced, completed, and lowered for their runtimes."""
