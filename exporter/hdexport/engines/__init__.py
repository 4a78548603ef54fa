"""The engines of a bundle."""
