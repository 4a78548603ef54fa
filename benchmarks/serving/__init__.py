"""Servers side by side: rates, waits and memory."""
