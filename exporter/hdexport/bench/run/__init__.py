"""A benchmark's run: planned, prepared, and its cases' processes in turns."""
