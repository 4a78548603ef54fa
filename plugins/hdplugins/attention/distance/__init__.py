"""Attention with terms of the clipped distance: the operator, and a face in each module."""
