"""Descriptions of all operators, for tests that iterate over them: one module per operator in `support/operators`.

A module has `NODES`, the nodes of the operator that tests try. That of a sparse operator, linear in tokens in both
orders of blocks, has a `DESCRIPTION`; that of one by distance has `BODIES`; another with a kernel has `KERNELS`.
One with a plugin has a `PLUGIN_NODE`, which a plugin is made for.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence

import support.operators
from hdplugins import OPERATORS
from support.attention_layers import BodyDescription, Description, Layer
from support.kernel_cases import KernelDescription

_MODULES = {
    module.NODES[0].operator.name: module
    for found in pkgutil.iter_modules(support.operators.__path__)
    for module in [importlib.import_module(f"support.operators.{found.name}")]
}

WITH_KERNELS = {name for name, operator in OPERATORS.items() if operator.has_implementation("kernel")}
"""Names of operators."""

NODES: dict[str, Sequence[Layer]] = {name: module.NODES for name, module in _MODULES.items()}

DESCRIPTIONS: dict[str, Description] = {
    name: module.DESCRIPTION for name, module in _MODULES.items() if hasattr(module, "DESCRIPTION")
}

KERNELS: dict[str, KernelDescription] = {
    name: module.KERNELS for name, module in _MODULES.items() if hasattr(module, "KERNELS")
}

BODIES: dict[str, BodyDescription] = {
    name: module.BODIES for name, module in _MODULES.items() if hasattr(module, "BODIES")
}

PLUGIN_NODES: dict[str, Layer] = {
    name: module.PLUGIN_NODE for name, module in _MODULES.items() if hasattr(module, "PLUGIN_NODE")
}
