"""The variants of TensorRT: which of them can build on this machine, for which GPUs, each with its own Polygraphy."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from hdplugins.tensorrt.link import provide_library_link
from hdruntime.backends.tensorrt.backend import RTX_ON_REQUEST
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import EngineError, HdexportError, InputError, Setting
from hdruntime.gpu.driver import driver_version, gpus
from hdruntime.optional import require

_VARIANTS = (Backend.TENSORRT, Backend.TENSORRT_RTX)

_NO_ARCHITECTURE = ("NONE", "CURRENT")
"""Members of TensorRT-RTX's ``ComputeCapability`` that name no GPU."""

_KERNELS_ALONE = ("Kernels for ONNX Runtime alone are built with ", Setting("targets", "onnx"), ".")


def load_variant(variant: Backend) -> ModuleType:
    """Import a variant of TensorRT that can build on this machine.

    Raises:
        MissingDependencyError: the package is not installed; the message gives the command that installs it.
        EngineError: the package does not load, or it needs a GPU and finds none.
    """
    assert variant in _VARIANTS, variant
    if variant is Backend.TENSORRT_RTX:
        provide_library_link()
    try:
        trt = require(variant)
    except HdexportError:
        raise
    except (ImportError, OSError) as error:
        raise EngineError(
            f"The package {variant} is installed but does not load: {error}", hint="See: hdexport doctor"
        ) from error
    if variant is Backend.TENSORRT and not gpus():
        driver = driver_version()
        raise EngineError(
            "TensorRT times its kernels on the GPU that the engine is for, and CUDA finds no GPU "
            f"({'no NVIDIA driver' if driver is None else f'driver {driver}'}).",
            hint=(
                "Build on the machine with the GPU, or build a TensorRT-RTX engine here: ",
                Setting("targets", "tensorrt-rtx"),
            ),
        )
    return trt


@functools.lru_cache(maxsize=1)
def load_polygraphy(variant: Backend) -> ModuleType:
    """Polygraphy's TensorRT backend, bound to a variant.

    Polygraphy binds itself to one variant when it is imported. A change of variant imports Polygraphy again,
    so that one command can build engines for both.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] == "polygraphy"]:
        del sys.modules[name]
    require("polygraphy")
    config: Any = importlib.import_module("polygraphy.config")
    config.USE_TENSORRT_RTX = variant is Backend.TENSORRT_RTX
    return importlib.import_module("polygraphy.backend.trt")


def architectures_from_option(text: str | None) -> tuple[str, ...]:
    """GPU architectures such as ``sm86``, without duplicates, from the option ``--sm``: a list as ``80,86``, or as
    ``8.6``, ``sm86`` or ``sm_86``. None is an empty list."""
    names = []
    for item in [] if text is None else text.split(","):
        number = item.strip().lower().removeprefix("sm").removeprefix("_").replace(".", "", 1)
        if not (number.isascii() and number.isdecimal() and len(number) in (2, 3)):
            raise InputError(parameter="architectures", value=item, accepted="GPU architectures, for example 86,89")
        names.append(f"sm{number}")
    return tuple(dict.fromkeys(names))


class EngineTarget:
    """A TensorRT that can build on this machine, and the GPUs that its engine is for.

    ``Backend.TENSORRT`` needs the GPU that the engine is for, ``Backend.TENSORRT_RTX`` none: its engine may be
    restricted to architectures, e.g. ``("sm86", "sm89")``; empty for its default, all since Ampere.

    Attributes:
        trt: the package ``tensorrt`` or ``tensorrt_rtx``.
        architectures: architectures of the GPUs that the engine runs on.
    """

    def __init__(self, variant: Backend, restricted_to: Sequence[str] = ()) -> None:
        self.variant = variant
        self.restricted_to = tuple(restricted_to)
        self.trt = load_variant(variant)
        self.architectures = self._of_this_gpu() if variant is Backend.TENSORRT else self._of_tensorrt_rtx()

    def _of_this_gpu(self) -> tuple[str, ...]:
        if self.restricted_to:
            raise InputError(
                Setting("architectures"),
                " is for TensorRT-RTX; TensorRT builds for the GPU of this machine.",
                hint=("Leave it out, or use ", Setting("targets", "tensorrt-rtx"), ". ", *_KERNELS_ALONE),
            )
        return (gpus()[0].architecture,)

    def _of_tensorrt_rtx(self) -> tuple[str, ...]:
        members = self.trt.ComputeCapability.__members__
        supported = [name.lower() for name in members if name not in _NO_ARCHITECTURE]
        unknown = [name for name in self.restricted_to if name not in supported]
        if unknown:
            raise InputError(
                f"TensorRT-RTX {self.trt.__version__} does not build for {', '.join(unknown)}.",
                hint=(
                    "Give ",
                    Setting("architectures"),
                    f" with some of {', '.join(name.removeprefix('sm') for name in supported)}. ",
                    *_KERNELS_ALONE,
                ),
            )
        return self.restricted_to or tuple(name for name in supported if name not in RTX_ON_REQUEST)
