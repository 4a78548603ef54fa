"""Compiled kernels for a bundle's attention in ONNX Runtime on an NVIDIA GPU, where there are any for the GPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hdplugins import OPERATORS
from hdplugins.attention.operator import Operator
from hdplugins.attention.plugin_spec import plugin_spec_of
from hdplugins.kernels.aot import KernelError
from hdplugins.kernels.cuda_launch import find_kernels
from hdplugins.onnxruntime.operators import KernelOperators, launcher_unavailable_reason, library_path
from hdruntime.bundle.manifest import KernelNode
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import KERNELS_FOLDER

logger = logging.getLogger(__name__)

INSTALL_LAUNCHER = "pip install --force-reinstall --no-deps hdexport (a wheel for this platform, or with a C compiler)"
"""Gets the library that launches kernels, where it is missing or another version's."""


def use_kernels(bundle: Bundle, options: Any, *, architecture: int, provider: str) -> bool:
    """Let sessions with these ``SessionOptions`` run the bundle's attention by its compiled kernels; returns whether
    they do.

    Where a kernel is missing, or what launches kernels, all attention runs by the bodies of its functions: an operator
    that is registered and has no kernel would fail. A log line says what is missing. `architecture` is the GPU's
    compute capability, sm_90 is 90, and `provider` ONNX Runtime's name of its provider.
    """
    # An operator is registered for all nodes of a type.
    left = {node.op_type for node in bundle.manifest.kernel_nodes if not node.is_for(f"sm{architecture}")}
    nodes = [node for node in bundle.manifest.kernel_nodes if node.op_type not in left]
    if not nodes:
        return False
    missing = _what_is_missing(bundle, nodes, architecture)
    if missing is not None:
        logger.warning("attention runs without compiled kernels on the GPU, which is slower: %s", missing)
        return False
    library = library_path()
    assert library is not None
    types: Mapping[str, Operator] = {node.op_type: OPERATORS[node.operator] for node in nodes}
    KernelOperators(library, bundle.path / KERNELS_FOLDER, node_types=types, provider=provider).register(options)
    logger.info("kernels for sm_%d compute %s", architecture, ", ".join(sorted({each.name for each in types.values()})))
    return True


def _what_is_missing(bundle: Bundle, nodes: Sequence[KernelNode], architecture: int) -> str | None:
    launcher = launcher_unavailable_reason()
    if launcher is not None:
        return f"the library that launches kernels {launcher}; build it with: {INSTALL_LAUNCHER}"
    try:
        for node in nodes:
            _check(bundle, node, architecture)
    except KernelError as error:
        return str(error)
    return None


def _check(bundle: Bundle, node: KernelNode, architecture: int) -> None:
    operator = OPERATORS[node.operator]
    spec = plugin_spec_of(operator)

    def serves(kernel: Any) -> bool:
        return spec.serves(kernel, node.shapes, node.operator_attributes, dtype=bundle.manifest.dtype)

    find_kernels(
        bundle.path / KERNELS_FOLDER, f"{operator.name}-", spec.kernels, architecture=architecture, serves=serves
    )
