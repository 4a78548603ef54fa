"""Batches: what a caller gives is checked, put together by length, and run."""
