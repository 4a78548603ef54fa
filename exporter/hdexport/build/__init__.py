"""The pipeline: a checkpoint becomes a bundle."""

from __future__ import annotations

__all__ = ["BuildOptions", "build"]

from hdexport.build.options import BuildOptions
from hdexport.build.pipeline import build
