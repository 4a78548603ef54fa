"""The folder of a backend; see `benchmarks.cpu.feeding.stand_in`."""
