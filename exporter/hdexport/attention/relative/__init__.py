"""Relative attention: scores depend on distances, and a text sees the memory of the texts before it."""
