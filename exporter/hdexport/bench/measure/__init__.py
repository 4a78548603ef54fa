"""Measurements: processes with limits, calls, and memory."""
