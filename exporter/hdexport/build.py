"""Build a bundle from a checkpoint; `hdexport.pipeline` has the steps."""

from __future__ import annotations

__all__ = ["BuildOptions", "build"]

from hdexport.pipeline.options import BuildOptions
from hdexport.pipeline.run import build
