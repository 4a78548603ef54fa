"""The results of a benchmark: in memory, in files, in words, and compared with other results."""
