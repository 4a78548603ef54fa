"""The results of a benchmark: as objects, in files, in words, and compared with other results."""
