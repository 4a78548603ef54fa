"""Relative attention: scores depend on distances, and a text sees what is remembered of those before it."""
