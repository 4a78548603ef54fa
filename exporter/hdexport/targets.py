"""What a build makes beside the ONNX graphs: the names of ``--target``, and what ``auto`` means here."""

from __future__ import annotations

__all__ = ["TARGETS", "flavours_of_targets"]

import ctypes.util
import importlib.util
import logging
from collections.abc import Sequence

from hdruntime.bundle import Backend
from hdruntime.errors import InputError

logger = logging.getLogger(__name__)

TARGETS = ("auto", "onnx", "tensorrt", "tensorrt-rtx")


def flavours_of_targets(targets: Sequence[str]) -> tuple[Backend, ...]:
    """The TensorRT flavours that targets ask for.

    A flavour that is named is built or the build fails; ``auto`` takes those that can build here and logs why.

    Args:
        targets: names of `TARGETS`.

    Returns:
        ``Backend.TENSORRT``, ``Backend.TENSORRT_RTX``, both or none, each once.

    Raises:
        InputError: there is no such target.
    """
    flavours: dict[Backend, None] = {}
    for target in targets:
        if target not in TARGETS:
            raise InputError(f"There is no target {target!r}.\nChoose from: {', '.join(TARGETS)}.")
        if target == "auto":
            flavours.update(dict.fromkeys(_available()))
        elif target != "onnx":
            flavours[Backend(target.replace("-", "_"))] = None
    return tuple(flavours)


def _available() -> list[Backend]:
    found = []
    # TensorRT times its kernels on the GPU it builds for; TensorRT-RTX leaves that to the machine it runs on.
    if importlib.util.find_spec("tensorrt") is None:
        logger.info("target auto: no TensorRT engine, the package tensorrt is not installed")
    elif ctypes.util.find_library("cuda") is None:
        logger.info("target auto: no TensorRT engine, it needs an NVIDIA GPU and there is no driver")
    else:
        logger.info("target auto: a TensorRT engine, the package and a driver are here")
        found.append(Backend.TENSORRT)
    if importlib.util.find_spec("tensorrt_rtx") is None:
        logger.info("target auto: no TensorRT-RTX engine, the package tensorrt_rtx is not installed")
    else:
        logger.info("target auto: a TensorRT-RTX engine, the package is here and needs no GPU to build")
        found.append(Backend.TENSORRT_RTX)
    return found
