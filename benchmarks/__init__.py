"""What is measured, and how: see README.md. Run from a checkout, where hdexport need not be installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

if importlib.util.find_spec("hdexport") is None:
    _SOURCES = [str(Path(__file__).parents[1] / name) for name in ("exporter", "runtime", "plugins")]
    sys.path[1:1] = _SOURCES
    # For the processes that are started.
    os.environ["PYTHONPATH"] = os.pathsep.join([*_SOURCES, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
