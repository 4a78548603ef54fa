"""Relative attention: the operator, and a face in each module."""
