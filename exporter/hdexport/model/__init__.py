"""A PyTorch model and its changes before it is traced."""
