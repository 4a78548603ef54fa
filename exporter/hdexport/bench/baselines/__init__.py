"""Baselines: the model of a bundle in PyTorch, and as a plain ONNX export."""

from __future__ import annotations

__all__ = ["BASELINES"]

from hdexport.bench.baselines.baseline import Baseline
from hdexport.bench.baselines.onnx_plain import OnnxPlain
from hdexport.bench.baselines.torch_model import TorchCompile, TorchEager

BASELINES: dict[str, Baseline] = {baseline.name: baseline for baseline in (TorchEager(), TorchCompile(), OnnxPlain())}
"""Name -> baseline, in the order of tables."""
