"""OpenVINO, on CPUs and on Intel's GPUs and NPUs."""

from __future__ import annotations

__all__ = ["OpenVinoRunner", "is_unpadded"]

from hdruntime.backends.openvino.runner import OpenVinoRunner, is_unpadded
