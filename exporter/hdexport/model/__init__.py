"""A PyTorch model and what is changed in it before it is traced."""
