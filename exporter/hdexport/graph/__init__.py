"""ONNX graphs: traced, completed, and lowered for what runs them."""
