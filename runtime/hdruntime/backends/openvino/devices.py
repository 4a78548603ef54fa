"""OpenVINO's devices on this machine, and the precision of a session on a device."""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

from hdruntime.backends.bundle_runner import needs_float32
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import BackendUnavailableError
from hdruntime.optional import require

CPU = "CPU"
"""OpenVINO's name of the processor."""


class OpenVinoDevice(NamedTuple):
    """A device that OpenVINO runs models on, named as OpenVINO names it.

    Attributes:
        model: the device's name for itself.
        capabilities: its types of numbers, in OpenVINO's words: ``FP32``, ``BF16``, ``FP16``, ``INT8`` and others.
    """

    name: str
    model: str
    capabilities: tuple[str, ...]

    @property
    def has_bfloat16(self) -> bool:
        """Whether the device computes in bfloat16; OpenVINO emulates it on some CPUs, which do not say so."""
        return "BF16" in self.capabilities


def new_core() -> Any:
    """OpenVINO's ``Core``, by which models are read and compiled."""
    return require("openvino").Core()


def chosen_device(core: Any, name: str | None) -> OpenVinoDevice:
    """The device that OpenVINO lists by a name; ``GPU`` is its first GPU where it lists several, None the CPU."""
    name = name or CPU
    # Listing devices loads the drivers of GPUs and NPUs: 6 MB that a session on the CPU keeps.
    available = (CPU,) if name == CPU else core.available_devices
    if name not in (*available, *(listed.partition(".")[0] for listed in available)):
        raise BackendUnavailableError(
            f"OpenVINO finds no device {name!r} here; it has {', '.join(available)}.",
            hint="Name one of these, or leave the device out for the CPU. GPUs and NPUs need their drivers.",
        )
    return OpenVinoDevice(
        name=name,
        model=core.get_property(name, "FULL_DEVICE_NAME").strip(),
        capabilities=tuple(core.get_property(name, "OPTIMIZATION_CAPABILITIES")),
    )


def chosen_precision(device: OpenVinoDevice, precision: Precision, manifest: Manifest) -> Precision:
    """The precision of a session on a device; ``auto`` on a GPU or NPU, where OpenVINO decides.

    A precision that the device does not compute in is rejected: OpenVINO would silently compute in another.
    """
    if precision is Precision.BFLOAT16 and not device.has_bfloat16:
        raise BackendUnavailableError(
            f"{device.model} ({device.name}) does not compute in {precision}; OpenVINO says that it has "
            f"{', '.join(device.capabilities)}.",
            hint="Leave out the precision, or use auto, which is float32 here.",
        )
    if precision is Precision.INT8 and device.name == CPU and is_arm():
        raise BackendUnavailableError(
            "OpenVINO computes int8 graphs wrongly on ARM, if weights have a scale for each output, as this bundle's.",
            hint="Use the backend onnxruntime, or leave out the precision.",
        )
    if needs_float32(manifest):
        if precision is Precision.BFLOAT16:
            raise BackendUnavailableError(
                f"This bundle sorts tokens by hashes, whose counts {precision} rounds: its outputs would be wrong.",
                hint="Leave out the precision, or use auto, which is float32 here.",
            )
        return Precision.FLOAT32 if precision is Precision.AUTO else precision
    if precision is not Precision.AUTO or device.name != CPU:
        return precision
    is_half = manifest.dtype in ("bfloat16", "float16")
    return Precision.BFLOAT16 if is_half and device.has_bfloat16 else Precision.FLOAT32


def is_arm() -> bool:
    """Whether this machine's processor is ARM's, where OpenVINO 2026.4.1 gives an int8 ``MatMul`` whose weights have a
    scale for each output results that are off by half (Cortex-A72 and Neoverse N1 and V1 in QEMU 10.0, 2026-11-29)."""
    return platform.machine().lower() in ("aarch64", "arm64")
