"""Texts: tokens, pieces of long texts, vectors, and the meaning of a task's outputs."""
