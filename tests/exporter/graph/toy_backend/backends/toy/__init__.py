"""ONNX's own interpreter in NumPy as a backend."""
