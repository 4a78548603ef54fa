"""Bucketed relative position attention: the operator and its implementations, one per module."""
