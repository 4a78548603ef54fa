"""The TensorRT that builds an engine, and the GPUs that the engine is for."""

from __future__ import annotations

from collections.abc import Sequence

from hdexport.graph.targets.tensorrt.packages import load_flavour
from hdruntime.backends.tensorrt.backend import RTX_ON_REQUEST
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import InputError
from hdruntime.gpu.driver import gpus

_NO_ARCHITECTURE = ("NONE", "CURRENT")
"""Members of TensorRT-RTX's ``ComputeCapability`` that name no GPU."""


class EngineTarget:
    """A TensorRT that can build on this machine, and the GPUs that its engine is for.

    ``Backend.TENSORRT`` needs the GPU that the engine is for, ``Backend.TENSORRT_RTX`` none: its engine may be
    restricted to architectures, e.g. ``("sm86", "sm89")``; empty for its default, all since Ampere.

    Attributes:
        trt: the package ``tensorrt`` or ``tensorrt_rtx``.
        architectures: architectures of the GPUs that the engine runs on.
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
        return self.restricted_to or tuple(name for name in supported if name not in RTX_ON_REQUEST)
