"""NVIDIA GPUs: what there is, and arrays in their memory."""
