"""`hdexport build` that takes a stored graph where it would trace the model: for claims about files and output."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

import hdexport.graph.tracing
from hdexport.cli import main


def take_stored_graph(patch: pytest.MonkeyPatch, bundle: Path) -> None:
    """Let every build take the portable graph of a bundle, which must be one of the same model and options."""
    patch.setattr(
        hdexport.graph.tracing,
        "trace",
        lambda *_, **__: hdexport.graph.tracing.Trace(ir.load(bundle / "model.onnx"), ()),
    )


def build_of_stored_graph(bundle: Path, arguments: list[str]) -> int:
    """A command in a process of its own that builds so; its exit code."""
    take_stored_graph(pytest.MonkeyPatch(), bundle)
    return main(arguments)
