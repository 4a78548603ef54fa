"""The targets of a build: the values of ``--target``, and the TensorRT and the GPUs behind each."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hdexport.engines.tensorrt_packages import buildable_flavours, load_flavour
from hdruntime.bundle.manifest import Backend
from hdruntime.constants import TENSORRT_RTX_ON_REQUEST
from hdruntime.errors import InputError
from hdruntime.gpu.driver import gpus
from hdruntime.optional import is_installed, require

logger = logging.getLogger(__name__)

TARGETS = ("auto", "onnx", "openvino", "tensorrt", "tensorrt-rtx")

_NO_ARCHITECTURE = ("NONE", "CURRENT")
"""Members of TensorRT-RTX's ``ComputeCapability`` that name no GPU."""


class EngineTarget:
    """A TensorRT that can build on this machine, and the GPUs that its engine is for.

    Args:
        flavour: ``Backend.TENSORRT``, which needs the GPU that the engine is for, or ``Backend.TENSORRT_RTX``, which
            needs none.
        restricted_to: GPU architectures of a TensorRT-RTX engine, e.g. ``("sm86", "sm89")``; empty for its default, all
            since Ampere.

    Attributes:
        trt: the package ``tensorrt`` or ``tensorrt_rtx``.
        architectures: architectures of the GPUs that the engine runs on.

    Raises:
        MissingDependencyError: the package is not installed.
        EngineError: the flavour cannot build on this machine.
        InputError: this TensorRT cannot build for one of the architectures.
    """

    def __init__(self, flavour: Backend, restricted_to: Sequence[str] = ()) -> None:
        self.flavour = flavour
        self.restricted_to = tuple(restricted_to)
        self.trt = load_flavour(flavour)
        self.architectures = self._of_this_gpu() if flavour is Backend.TENSORRT else self._of_tensorrt_rtx()

    def _of_this_gpu(self) -> tuple[str, ...]:
        if self.restricted_to:
            raise InputError(
                "--sm is for TensorRT-RTX; TensorRT builds for the GPU of this machine.\n"
                "Leave --sm out, or use --target tensorrt-rtx."
            )
        return (gpus()[0].architecture,)

    def _of_tensorrt_rtx(self) -> tuple[str, ...]:
        members = self.trt.ComputeCapability.__members__
        supported = [name.lower() for name in members if name not in _NO_ARCHITECTURE]
        unknown = [name for name in self.restricted_to if name not in supported]
        if unknown:
            raise InputError(
                f"TensorRT-RTX {self.trt.__version__} does not build for {', '.join(unknown)}.\n"
                f"Give --sm with some of {', '.join(name.removeprefix('sm') for name in supported)}."
            )
        return self.restricted_to or tuple(name for name in supported if name not in TENSORRT_RTX_ON_REQUEST)


def flavours_of_targets(targets: Sequence[str]) -> tuple[Backend, ...]:
    """The TensorRT flavours that the targets name.

    A named flavour is built or the build fails; ``auto`` takes flavours that can build on this machine and logs why.

    Args:
        targets: values of `TARGETS`.

    Returns:
        ``Backend.TENSORRT``, ``Backend.TENSORRT_RTX``, both or neither.
    """
    flavours: dict[Backend, None] = {}
    for target in targets:
        if target == "auto":
            flavours.update(dict.fromkeys(buildable_flavours()))
        elif target not in ("onnx", "openvino"):
            flavours[Backend(target.replace("-", "_"))] = None
    logger.info("engines to build: %s", ", ".join(flavour.value for flavour in flavours) or "none")
    return tuple(flavours)


def builds_for_openvino(targets: Sequence[str]) -> bool:
    """Whether the targets name OpenVINO; ``auto`` does where it is installed.

    Args:
        targets: values of `TARGETS`.

    Raises:
        MissingDependencyError: OpenVINO is named and not installed: the bundle could not be verified.
    """
    if "openvino" in targets:
        require("openvino")
        return True
    return "auto" in targets and is_installed("openvino")
