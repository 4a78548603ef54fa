"""Local attention with relative position biases and side keys: the operator and its implementations, one per module."""
