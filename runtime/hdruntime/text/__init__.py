"""Texts: tokens, pieces of long texts, vectors, and what a task's outputs mean."""
