"""The GPU kernels of a bundle: compiled for the GPUs that its engines are for, and copied beside them.

A kernel is compiled for an architecture, not for a GPU: a kernel for sm_86 runs on sm_89. The engines' architectures
and the operators' geometry decide which kernels a bundle holds: no duplicates, and none that no engine runs.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from hdplugins import OPERATORS, Operator
from hdplugins.attention.plugin_spec import plugin_spec_of
from hdplugins.kernels.aot import KernelError, KernelSource, compile_kernels
from hdruntime.bundle.manifest import KernelNode
from hdruntime.constants import KERNELS_FOLDER
from hdruntime.errors import ExportError, InputError, MissingDependencyError, Setting
from hdruntime.optional import is_installed
from hdruntime.process_limits import chosen_threads

logger = logging.getLogger(__name__)

_OTHERWISE = ("Or leave attention to standard operators: ", Setting("attention_impl", "native"))


def write_kernels(
    nodes: Sequence[KernelNode],
    bundle: Path,
    *,
    dtype: str,
    architectures: Sequence[str],
    progress: Callable[[str], None] | None = None,
) -> tuple[str, ...]:
    """Compile the kernels that compute these nodes on GPUs of these architectures, or take them from the cache, and
    copy them.

    Each becomes a cubin and a JSON file in the bundle's folder ``kernels``. Returns the files, relative to the bundle;
    without nodes there are none, and no folder.

    Raises:
        InputError: there is no kernel for an architecture.
        ExportError: a kernel cannot be compiled.
    """
    wanted = _sources(nodes, dtype, architectures)
    if not wanted:
        return ()
    if not is_installed("triton"):
        raise MissingDependencyError(
            "hdexport's attention kernels are compiled by the package 'triton', which is not installed.",
            hint=("Install it with: pip install triton (on Linux). ", *_OTHERWISE),
        )
    if progress is not None:
        compiled_for = sorted({source.architecture for _, source in wanted})
        progress(f"Preparing {len(wanted)} GPU kernels for {', '.join(f'sm{number}' for number in compiled_for)}")
    try:
        compiled = compile_kernels([source for _, source in wanted], processes=chosen_threads()[0])
    except KernelError as error:
        raise ExportError(f"{error}", hint=_OTHERWISE) from error
    folder = bundle / KERNELS_FOLDER
    folder.mkdir(exist_ok=True)
    files = []
    for (operator, _), kernel in zip(wanted, compiled, strict=True):
        for source in (kernel.cubin, kernel.metadata):
            # The loader looks for an operator's kernels by its name: two operators may have functions of one name.
            file = folder / f"{operator.name}-{source.name}"
            shutil.copyfile(source, file)
            files.append(file.relative_to(bundle).as_posix())
    logger.info("%d kernels for %s are in %s", len(wanted), ", ".join(architectures), folder)
    return tuple(files)


def _sources(
    nodes: Sequence[KernelNode], dtype: str, architectures: Sequence[str]
) -> list[tuple[Operator, KernelSource]]:
    """The kernels that the nodes need, without duplicates."""
    wanted: list[tuple[Operator, KernelSource]] = []
    for node in nodes:
        operator = OPERATORS[node.operator]
        numbers = [int(name.removeprefix("sm")) for name in architectures if node.is_for(name)]
        try:
            sources = plugin_spec_of(operator).kernel_sources(
                node.shapes, node.operator_attributes, dtype=dtype, architectures=numbers
            )
        except ValueError as error:
            raise InputError(
                f"{error}", hint=("Leave that GPU out of ", Setting("architectures"), ". ", *_OTHERWISE)
            ) from error
        wanted += [(operator, source) for source in sources if (operator, source) not in wanted]
    return wanted
