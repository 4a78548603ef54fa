"""What a build makes beside the ONNX graphs: the names of ``--target``, and what ``auto`` means here."""

from __future__ import annotations

__all__ = ["TARGETS", "flavours_of_targets"]

import logging
from collections.abc import Sequence

from hdexport.engines.tensorrt_packages import buildable_flavours
from hdruntime.bundle.manifest import Backend

logger = logging.getLogger(__name__)

TARGETS = ("auto", "onnx", "tensorrt", "tensorrt-rtx")


def flavours_of_targets(targets: Sequence[str]) -> tuple[Backend, ...]:
    """The TensorRT flavours that targets ask for.

    A flavour that is named is built or the build fails; ``auto`` takes those that can build here and logs why.

    Args:
        targets: names of `TARGETS`.

    Returns:
        ``Backend.TENSORRT``, ``Backend.TENSORRT_RTX``, both or none, each once.
    """
    flavours: dict[Backend, None] = {}
    for target in targets:
        if target == "auto":
            flavours.update(dict.fromkeys(buildable_flavours()))
        elif target != "onnx":
            flavours[Backend(target.replace("-", "_"))] = None
    logger.info("engines to build: %s", ", ".join(flavour.value for flavour in flavours) or "none")
    return tuple(flavours)
