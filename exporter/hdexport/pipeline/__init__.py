"""The pipeline: a checkpoint becomes a bundle."""

from __future__ import annotations

__all__ = ["BuildOptions", "build"]

from hdexport.pipeline.options import BuildOptions
from hdexport.pipeline.run import build
