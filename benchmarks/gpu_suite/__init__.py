"""The steps of benchmarks/gpu_suite.py, and what runs them."""
