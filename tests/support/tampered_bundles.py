"""Copies of tiny bundles whose graphs were changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir

from hdexport.support.bundle_writer import seal
from hdruntime.arrays import FloatArray
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


def multiplied_by(factors: FloatArray) -> Callable[[ir.Model], None]:
    """A change to a graph: the features of its last output are multiplied by the factors, [features]."""

    def multiply(model: ir.Model) -> None:
        right = model.graph.outputs[-1]
        constant = ir.node("Constant", [], attributes={"value": ir.tensor(factors)})
        product = ir.node("Mul", [right, constant.outputs[0]])
        model.graph.extend([constant, product])
        wrong, name = product.outputs[0], right.name
        wrong.shape, wrong.type = right.shape, right.type
        right.name, wrong.name = f"right_{name}", name
        model.graph.outputs[-1] = wrong

    return multiply
