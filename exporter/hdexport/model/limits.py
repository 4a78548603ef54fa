"""Limits of all models; importing this module imports nothing."""

from __future__ import annotations

MAX_POSITIONS = 2**24
"""Most positions in any scheme: PyTorch's embeddings keep an id per position, 128 MiB at this length."""
