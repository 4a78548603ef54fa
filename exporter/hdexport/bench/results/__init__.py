"""What a benchmark found: in memory, in files, in words, and compared with another."""
