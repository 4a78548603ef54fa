"""NVIDIA GPUs: what there is, arrays in their memory, and the way of batches there and back."""
