"""Lists the stand-in for the registry of backends."""

from benchmarks.cpu.feeding.stand_in import StandInBackend

BACKENDS = (StandInBackend(),)
