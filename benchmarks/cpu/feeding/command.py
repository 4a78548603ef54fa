"""Runs ``hdexport`` with the stand-in among the backends: ``python -m benchmarks.cpu.feeding.command serve BUNDLE``."""

import sys

from benchmarks.cpu.feeding.stand_in import add_stand_in
from hdexport.cli import main

if __name__ == "__main__":
    add_stand_in()
    sys.exit(main())
