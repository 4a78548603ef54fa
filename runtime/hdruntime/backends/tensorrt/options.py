"""What a caller may choose about running engines, checked."""

from __future__ import annotations

__all__ = ["checked_options"]

import logging
from typing import Any, TypeVar

from hdruntime.backends.tensorrt.engine import KernelSpecialization
from hdruntime.backends.tensorrt.graph_policy import GraphMode
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import InputError

logger = logging.getLogger(__name__)

Member = TypeVar("Member", GraphMode, KernelSpecialization)


def checked_options(
    backend: Backend, graphs: GraphMode | str, most_graphs: int, specialization: KernelSpecialization | str | None
) -> tuple[GraphMode, KernelSpecialization]:
    """The options of a runner, as members of their enums.

    Args:
        backend: what runs the engine.
        graphs: when CUDA graphs are used.
        most_graphs: graphs that are kept.
        specialization: of TensorRT-RTX; None for its default.

    Raises:
        InputError: there is no such value, or options contradict each other.
    """
    mode = _member(GraphMode, "graphs", graphs)
    if most_graphs < 1:
        raise InputError(f"most_graphs is {most_graphs}; it must be 1 or more. graphs='off' uses none.")
    if backend is not Backend.TENSORRT_RTX:
        if specialization is not None:
            raise InputError(f"kernel_specialization is for tensorrt_rtx; {backend.value} has none. Leave it out.")
        return mode, KernelSpecialization.LAZY
    wanted = _member(KernelSpecialization, "kernel_specialization", specialization or KernelSpecialization.LAZY)
    if wanted is not KernelSpecialization.LAZY or mode is GraphMode.OFF:
        return mode, wanted
    if mode is GraphMode.ON:
        raise InputError(
            "graphs='on' needs kernel_specialization='eager' or 'none': lazy replaces kernels between runs.\n"
            "Give one of them, or graphs='auto'."
        )
    logger.info("no CUDA graphs: TensorRT-RTX specialises kernels lazily; kernel_specialization eager or none has them")
    return GraphMode.OFF, wanted


def _member(kind: type[Member], option: str, value: Any) -> Member:
    try:
        return kind(value)
    except ValueError:
        valid = ", ".join(member.value for member in kind)
        raise InputError(f"{option} is {value!r}; valid are {valid}.") from None
