"""TensorRT plugins, made of operators' faces."""
