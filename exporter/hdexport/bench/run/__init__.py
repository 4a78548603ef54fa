"""A benchmark's run: planned, prepared, and measured in rounds of processes."""
