"""Names that every package shares."""

from __future__ import annotations

ONNX_DOMAIN = "hdexport"
"""The ONNX domain of the operators."""

ONNX_DOMAIN_VERSION = 2
"""Opset version of that domain."""

ONNX_OPSET = 20
"""Standard opset of the portable graph: the first with Gelu, old enough for every current runtime."""
