"""Texts: tokens, pieces of what is too long, vectors, and what a task's outputs mean."""
