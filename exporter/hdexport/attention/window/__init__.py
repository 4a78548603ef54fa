"""Windowed attention, with global tokens."""
