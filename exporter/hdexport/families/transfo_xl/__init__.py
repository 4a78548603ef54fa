"""Transformer-XL, with model classes of its own: transformers 5 has none."""
