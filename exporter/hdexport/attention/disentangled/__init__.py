"""Disentangled attention: scores of contents, and of contents with the distance between tokens, both ways."""
