"""Copies of tiny bundles whose graphs were changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir

from hdexport.support.bundle_writer import seal
from hdruntime.bundle.verification import Case


def tampered(bundle: Any, path: Path, change: Callable[[ir.Model], None], *files: str) -> Path:
    """Write a sealed copy of a `TinyBundle` to `path`, with a change to these graphs of it."""
    shutil.copytree(bundle.path, path)
    for file in files:
        model = ir.load(path / file)
        change(model)
        ir.save(model, path / file)
    seal(path, bundle.manifest)
    return path


def positions_used(case: Case) -> int:
    """Positions that real tokens of a BERT's batch have: padding on the left shifts them."""
    return case.tokens if case.padding == "left" else max(case.lengths)
