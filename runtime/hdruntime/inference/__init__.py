"""Batches: a caller's inputs are checked, packed by length, and run."""
