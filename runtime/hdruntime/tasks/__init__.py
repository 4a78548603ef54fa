"""The tasks, a file for each: its format in a bundle, its answer, and how jobs, servers and encoders give it."""
