"""The attention operators of hdexport: specifications and implementations."""

from __future__ import annotations

__all__ = ["ONNX_DOMAIN", "ONNX_DOMAIN_VERSION", "ONNX_OPSET", "OPERATORS", "Operator"]

import importlib
import pkgutil

import hdplugins.attention
from hdplugins.attention.operator import Operator
from hdplugins.constants import ONNX_DOMAIN, ONNX_DOMAIN_VERSION, ONNX_OPSET


def _operators() -> dict[str, Operator]:
    folders = [module.name for module in pkgutil.iter_modules(hdplugins.attention.__path__) if module.ispkg]
    operators = [importlib.import_module(f"hdplugins.attention.{folder}.operator").OPERATOR for folder in folders]
    return {operator.name: operator for operator in sorted(operators, key=lambda operator: operator.name.lower())}


OPERATORS = _operators()
"""Every operator by name: one in each folder of `hdplugins.attention`. Conformance tests and the README's support table
iterate over it."""
