"""GPU kernels: what they share, how they are compiled ahead of time, and how they are launched."""
