"""Attention as a model's own code computes it, in standard operators."""
