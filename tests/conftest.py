"""What holds for every test."""

import os

# Two test processes share two cores, and the threads that PyTorch would start spin. Before torch is imported, and in
# the environment, so that commands under test inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
