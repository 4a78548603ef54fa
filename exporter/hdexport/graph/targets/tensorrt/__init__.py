"""TensorRT engines: which are built, for which shapes and GPUs, and how."""
