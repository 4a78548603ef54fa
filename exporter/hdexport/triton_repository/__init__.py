"""A bundle as a model repository of Triton Inference Server. See docs/triton.md."""

from __future__ import annotations

__all__ = ["TritonModel", "package_for_triton"]

from hdexport.triton_repository.repository import TritonModel, package_for_triton
